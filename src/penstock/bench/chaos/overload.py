"""Ten times more requests than the server can answer: it goes on at its best rate and refuses the rest at once.

The photographs of the benchmark go to the shipped SRCNN. One costs a core about 0.2 s, so that ten times the peak
is some hundred requests a second: a load that the generator makes with a few percent of one core, on the same
machine, without taking from the server what it claims to measure.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from penstock.bench.chaos.report import Plan, Result
from penstock.bench.chaos.repository import add_shipped
from penstock.bench.chaos.server import FaultyServer
from penstock.bench.drivers import INFER, UnaryDriver
from penstock.bench.load import Window, run_closed
from penstock.bench.payloads import build

FACTOR = 10
# Enough callers that the instances never wait for one, too few to be refused.
CALLERS = 24
MAX_QUEUE = 16
SETTLE_S = 3.0  # until the queue is full, and the rate of answers is the rate of work
DEADLINE_S = 30.0


@dataclass(slots=True)
class Flood:
    """What became of the requests of one open-loop window."""

    offered: int = 0
    answered: int = 0  # within the window
    codes: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)  # how late the generator sent
    goodput: float = 0.0
    generator_share: float = 0.0  # of one core


async def run(plan: Plan) -> Result:
    repository = plan.folder / "models"
    add_shipped(repository, plan.models, "srcnn", max_queue=MAX_QUEUE)
    rounds, seconds = (2, 8.0) if plan.is_quick else (5, 30.0)
    peaks: list[float] = []
    floods: list[Flood] = []
    with FaultyServer(repository, plan.folder / "overload") as server:
        driver = UnaryDriver(server.grpc, build("photos", "srcnn"))
        await driver.open(CALLERS)
        await run_closed(driver, Window(5.0, CALLERS), 0)
        for number in range(rounds):
            peaks.append((await run_closed(driver, Window(seconds, CALLERS), number)).rps)
            floods.append(await flood(server.grpc, FACTOR * peaks[-1], seconds, seed=number))
            plan.say(f"peak {peaks[-1]:.1f}/s; under {FACTOR} times that {floods[-1].goodput:.1f}/s")
        peaks.append((await run_closed(driver, Window(seconds, CALLERS), rounds)).rps)
        await driver.close()
    return _result(peaks, floods)


async def flood(target: str, rate: float, seconds: float, seed: int) -> Flood:
    """Poisson arrivals for SETTLE_S and then `seconds`; answers count in the latter."""
    found = Flood()
    messages = [payload.grpc() for payload in build("photos", "srcnn")]
    rng = random.Random(seed)
    tasks: set[asyncio.Task[None]] = set()
    async with grpc.aio.insecure_channel(target, options=[("grpc.max_receive_message_length", -1)]) as channel:
        call = channel.unary_unary(INFER)
        intended = time.perf_counter()
        counted_from = intended + SETTLE_S
        end = counted_from + seconds
        cpu = time.process_time()
        while intended < end:
            await asyncio.sleep(max(0.0, intended - time.perf_counter()))
            found.lag_s.append(time.perf_counter() - intended)
            task = asyncio.create_task(_one(call, messages[found.offered % len(messages)], found, counted_from, end))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            found.offered += 1
            intended += rng.expovariate(rate)
        found.generator_share = (time.process_time() - cpu) / (SETTLE_S + seconds)
        await asyncio.gather(*tasks)
    found.goodput = found.answered / seconds
    return found


async def _one(call: Any, message: bytes, found: Flood, counted_from: float, end: float) -> None:
    sent = time.perf_counter()
    try:
        await call(message, timeout=DEADLINE_S)
        code = "OK"
    except grpc.aio.AioRpcError as error:
        code = error.code().name
    done = time.perf_counter()
    found.codes[code] += 1
    found.answered += code == "OK" and counted_from <= done <= end
    if code == "RESOURCE_EXHAUSTED":
        found.refused_s.append(done - sent)


def _result(peaks: list[float], floods: list[Flood]) -> Result:
    # Each flood lies between two peaks: what else the machine does meanwhile strikes both.
    ratios = [
        flood.goodput / ((before + after) / 2) for flood, before, after in zip(floods, peaks, peaks[1:], strict=False)
    ]
    refused = np.concatenate([np.array(flood.refused_s) for flood in floods]) * 1000
    lag = np.concatenate([np.array(flood.lag_s) for flood in floods]) * 1000
    codes = sum((flood.codes for flood in floods), Counter[str]())
    result = Result()
    result.must("overload_goodput_over_peak", float(np.median(ratios)), low=0.9)
    result.must("overload_refusal_p99_ms", float(np.percentile(refused, 99)), high=100)
    result.must("overload_failed", codes.total() - codes["OK"] - codes["RESOURCE_EXHAUSTED"], high=0)
    result.details = {
        "peak_rps": [round(peak, 2) for peak in peaks],
        "goodput_rps": [round(flood.goodput, 2) for flood in floods],
        "goodput_over_peak": [round(ratio, 3) for ratio in ratios],
        "offered": sum(flood.offered for flood in floods),
        "codes": dict(codes),
        "refusal_p50_ms": float(np.percentile(refused, 50)),
        "refusal_max_ms": float(refused.max()),
        "generator_lag_p99_ms": float(np.percentile(lag, 99)),
        "generator_cpu_share_of_a_core": round(max(flood.generator_share for flood in floods), 3),
    }
    return result
