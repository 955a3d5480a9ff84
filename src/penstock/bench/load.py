"""The load generator: a process of its own that runs one window of load after another.

It reads one JSON command a line on standard input and answers with one JSON line, so that
importing and connecting are never part of a window and its CPU time can be told apart.
"""

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field

import uvloop

from penstock.bench.drivers import Driver, Rejected, make_driver
from penstock.bench.payloads import build


@dataclass(slots=True)
class Window:
    """What to do: closed loop with `concurrency` callers, or open loop at `rate` requests a second."""

    seconds: float
    concurrency: int = 1
    rate: float = 0.0
    warm_up_s: float = 0.0  # load goes on from it into the window without a break


@dataclass(slots=True)
class Outcome:
    seconds: float = 0.0
    answered: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    sent: int = 0  # warm-up included, like cpu_s
    cpu_s: float = 0.0

    @property
    def rps(self) -> float:
        return self.answered / self.seconds if self.seconds else 0.0


async def run_closed(driver: Driver, window: Window, first: int) -> Outcome:
    """Each caller sends its next request when the last is answered. What ends inside the window counts."""
    outcome = Outcome(seconds=window.seconds)
    numbers = iter(range(first, sys.maxsize))
    start = time.perf_counter() + window.warm_up_s
    end = start + window.seconds

    async def caller(slot: int) -> None:
        while (sent := time.perf_counter()) < end:
            outcome.sent += 1
            try:
                await driver.call(slot, next(numbers))
            except Rejected as error:
                outcome.rejected[str(error)] = outcome.rejected.get(str(error), 0) + 1
                continue
            if start <= (done := time.perf_counter()) <= end:
                outcome.answered += 1
                outcome.latencies_s.append(done - sent)

    cpu = time.process_time()
    await asyncio.gather(*(caller(slot) for slot in range(window.concurrency)))
    outcome.cpu_s = time.process_time() - cpu
    return outcome


async def run_open(driver: Driver, window: Window, first: int) -> Outcome:
    """Poisson arrivals; latency counts from the intended send time, so a stalled generator cannot hide a stall."""
    outcome = Outcome()
    rng = random.Random(first)
    tasks: set[asyncio.Task[None]] = set()

    async def one(slot: int, number: int, intended: float) -> None:
        try:
            await driver.call(slot, number)
        except Rejected as error:
            outcome.rejected[str(error)] = outcome.rejected.get(str(error), 0) + 1
            return
        outcome.answered += 1
        outcome.latencies_s.append(time.perf_counter() - intended)

    cpu = time.process_time()
    start = intended = time.perf_counter()
    number = first
    while intended < start + window.seconds:
        await asyncio.sleep(max(0.0, intended - time.perf_counter()))
        task = asyncio.create_task(one(number % window.concurrency, number, intended))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
        outcome.sent += 1
        intended += rng.expovariate(window.rate)
    while tasks:
        await asyncio.wait(list(tasks))
    outcome.seconds = time.perf_counter() - start
    outcome.cpu_s = time.process_time() - cpu
    return outcome


async def _serve_commands(protocol: str, target: str, kind: str, model: str, concurrency: int) -> None:
    driver = make_driver(protocol, target, build(kind, model))
    await driver.open(concurrency)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _answer({"ready": True})
    first = 0
    while line := await reader.readline():
        window = Window(**json.loads(line))
        outcome = await (run_open if window.rate else run_closed)(driver, window, first)
        first += outcome.sent
        _answer(asdict(outcome))
    await driver.close()


def _answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    name, address, payload, model_name, callers = sys.argv[1:]
    uvloop.run(_serve_commands(name, address, payload, model_name, int(callers)))
