"""Send ten times more requests than the server can answer: it must answer at its peak rate and refuse the others.

The requests are photographs for the shipped SRCNN model. A photograph takes about 0.2 s of a core, so ten times the
peak is some hundred requests per second, which cost the load generator only a few percent of a core.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from benchmarks.server import ServerProcess
from penstock.experiments.load.drivers import INFER
from penstock.experiments.load.payloads import build_built_in_payloads
from tests.chaos.calls import get_status_name
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import add_shipped

FACTOR = 10
# Enough callers that the instances never wait for one, too few to be refused.
CALLERS = 24
MAX_QUEUE = 16
SETTLE_S = 3.0  # until the queue is full, and the rate of answers is the rate of work
DEADLINE_S = 30.0
OPTIONS = [("grpc.max_receive_message_length", -1)]


@dataclass(slots=True)
class Load:
    """A window of load after SETTLE_S, and the results of its requests."""

    seconds: float
    start: float = field(default_factory=time.perf_counter)
    messages: list[bytes] = field(
        default_factory=lambda: [photo.grpc() for photo in build_built_in_payloads("photos", "srcnn")]
    )
    answered: int = 0  # number of requests answered within the window
    codes: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)  # how late the generator sent each
    generator_share: float = 0.0  # of one core

    @property
    def end(self) -> float:
        return self.start + SETTLE_S + self.seconds

    @property
    def goodput(self) -> float:
        return self.answered / self.seconds


async def run(plan: ChaosPlan) -> Result:
    repository = plan.folder / "models"
    add_shipped(repository, plan.models, "srcnn", max_queue=MAX_QUEUE)
    rounds, seconds = (2, 8.0) if plan.is_quick else (5, 30.0)
    peaks: list[float] = []
    floods: list[Load] = []
    cpu_s = {"gateway": 0.0, "worker": 0.0}  # under the floods
    with ServerProcess(repository, plan.folder / "overload") as server:
        await run_closed(server.grpc, 1.0)
        for number in range(rounds):
            peaks.append((await run_closed(server.grpc, seconds)).goodput)
            before = server.cpu_s()
            floods.append(await run_open(server.grpc, FACTOR * peaks[-1], seconds, seed=number))
            cpu_s = {role: cpu_s[role] + total - before[role] for role, total in server.cpu_s().items()}
            plan.say(f"peak {peaks[-1]:.1f}/s; under {FACTOR} times that {floods[-1].goodput:.1f}/s")
        peaks.append((await run_closed(server.grpc, seconds)).goodput)
    result = _make_result(peaks, floods)
    result.details["server_cpu_s_under_flood"] = {role: round(total, 2) for role, total in cpu_s.items()}
    return result


async def run_closed(target: str, seconds: float) -> Load:
    """Run a closed loop of CALLERS callers, which wait for each answer; count like `run_open`."""
    found = Load(seconds)
    async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
        call = channel.unary_unary(INFER)

        async def caller(number: int) -> None:
            while time.perf_counter() < found.end and set(found.codes) <= {"OK"}:
                await _send_one(call, found, number)

        await asyncio.gather(*(caller(number) for number in range(CALLERS)))
    if set(found.codes) != {"OK"}:
        raise RuntimeError(f"the server does not even answer {CALLERS} callers: {dict(found.codes)}")
    return found


async def run_open(target: str, rate: float, seconds: float, seed: int) -> Load:
    """Run an open loop: send requests with Poisson arrivals, without waiting for answers."""
    found = Load(seconds)
    rng = random.Random(seed)
    tasks: set[asyncio.Task[None]] = set()
    async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
        call = channel.unary_unary(INFER)
        cpu = time.process_time()
        intended = found.start
        while intended < found.end:
            await asyncio.sleep(max(0.0, intended - time.perf_counter()))
            found.lag_s.append(time.perf_counter() - intended)
            task = asyncio.create_task(_send_one(call, found, len(found.lag_s)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            intended += rng.expovariate(rate)
        found.generator_share = (time.process_time() - cpu) / (found.end - found.start)
        await asyncio.gather(*tasks)
    return found


async def _send_one(call: Any, found: Load, number: int) -> None:
    sent = time.perf_counter()
    code = await get_status_name(call(found.messages[number % len(found.messages)], timeout=DEADLINE_S))
    done = time.perf_counter()
    found.codes[code] += 1
    found.answered += code == "OK" and found.end - found.seconds <= done <= found.end
    if code == "RESOURCE_EXHAUSTED":
        found.refused_s.append(done - sent)


def _make_result(peaks: list[float], floods: list[Load]) -> Result:
    # Measure a peak before and after each flood, because other work of the machine affects both alike.
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
        "offered": codes.total(),
        "codes": dict(codes),
        "refusal_p50_ms": float(np.percentile(refused, 50)),
        "refusal_max_ms": float(refused.max()),
        "generator_lag_p99_ms": float(np.percentile(lag, 99)),
        "generator_cpu_share_of_a_core": round(max(flood.generator_share for flood in floods), 3),
    }
    return result
