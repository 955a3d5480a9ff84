"""Load and unload models under load: no request may fail, and the memory of unloaded models must be released."""

import asyncio
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.checked_load import CheckedLoad, EchoQuestion
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import ECHO, add_echo

CYCLES = 200
QUICK_CYCLES = 40
SETTLED_AFTER = 10  # cycles: memory is compared with its size then
CALLERS = 8
PAUSE_S = 0.02  # of each caller between requests: the reloads need the cores, too
ANSWERS_BETWEEN_RELOADS = 20  # answers after each reload
BURST = 8
IDLE_MODEL = "napper"  # echoes, and is unloaded after IDLE_S without requests
IDLE_S = 0.1
SAMPLES = 5
DEADLINE_S = 30.0


@dataclass(slots=True)
class Cycles:
    reloads: int = 0
    wakes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    rss_bytes: list[int] = field(default_factory=list)  # after each cycle
    settled_bytes: float = 0.0
    last_bytes: float = 0.0

    @property
    def rss_growth(self) -> float:
        return self.last_bytes / self.settled_bytes - 1


async def run(plan: ChaosPlan) -> Result:
    repository = plan.folder / "models"
    add_models(repository)
    with ServerProcess(repository, plan.folder / "reload") as server:
        await server.wait_all_workers()
        async with CheckedLoad(server.grpc, [EchoQuestion()], CALLERS, PAUSE_S) as load:
            found = await run_cycles(server, load, QUICK_CYCLES if plan.is_quick else CYCLES, plan)
        result = Result(details={**load.tally.details(), **_list_details(found, server)})
    result.must("reload_failed", load.tally.failed + load.tally.duplicates + found.failures.total(), high=0)
    result.must("reload_rss_growth", found.rss_growth, high=0.05)
    return result


def add_models(repository: Path) -> None:
    add_echo(repository)
    add_echo(repository, name=IDLE_MODEL, residence={"load": "lazy", "idle_unload_s": IDLE_S})


async def run_cycles(server: ServerProcess, load: CheckedLoad, count: int, plan: ChaosPlan) -> Cycles:
    """Alternately reload one model, and let another be loaded by requests and unloaded when idle."""
    cycles = Cycles()
    settled_after = min(SETTLED_AFTER, count // 2)
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        for number in range(1, count + 1):
            if number % 2:
                await _reload(server, load, cycles)
            else:
                await _wake(server, channel, number, cycles)
            cycles.rss_bytes.append(server.rss_bytes())
            if number == settled_after:
                cycles.settled_bytes = await _measure_rss_bytes(server)
            if number % 20 == 0:
                plan.say(f"{number} of {count} cycles: {cycles.rss_bytes[-1] / 1e6:.0f} MB")
    cycles.last_bytes = await _measure_rss_bytes(server)
    return cycles


async def _reload(server: ServerProcess, load: CheckedLoad, cycles: Cycles) -> None:
    cycles.reloads += 1
    status, text = await server.load_model(ECHO)
    if status != 200:
        cycles.failures[f"load: {status} {text[:200]}"] += 1
    await load.answered_more(ANSWERS_BETWEEN_RELOADS)


async def _wake(server: ServerProcess, channel: grpc.aio.Channel, number: int, cycles: Cycles) -> None:
    """Send a burst of requests to a model that is not in memory; it is unloaded again later."""
    await _wait_until_unloaded(server)
    cycles.wakes += 1
    question = EchoQuestion(IDLE_MODEL)
    call = GRPCInferenceServiceStub(channel).ModelInfer
    numbers = range(number * BURST, (number + 1) * BURST)
    answers = await asyncio.gather(
        *(call(question.ask(each), timeout=DEADLINE_S) for each in numbers), return_exceptions=True
    )
    for each, answer in zip(numbers, answers, strict=True):
        if isinstance(answer, BaseException):
            cycles.failures[f"burst: {answer!r:.200}"] += 1
        elif not question.is_answer(each, answer):
            cycles.failures["burst: the wrong answer"] += 1
    await _wait_until_unloaded(server)


async def _wait_until_unloaded(server: ServerProcess) -> None:
    def states() -> list[str]:
        return [block["state"] for block in server.status()["blocks"] if block["model"] == IDLE_MODEL]

    await until_seen(lambda: states() == ["dormant"], f"{IDLE_MODEL} is dormant", 60)


async def _measure_rss_bytes(server: ServerProcess) -> float:
    """Return the memory of all the server's processes: the median of some samples."""
    samples: list[int] = []
    for _ in range(SAMPLES):
        await asyncio.sleep(0.2)
        samples.append(server.rss_bytes())
    return float(statistics.median(samples))


def _list_details(cycles: Cycles, server: ServerProcess) -> dict[str, Any]:
    return {
        "reloads": cycles.reloads,
        "wakes": cycles.wakes,
        "cycle_failures": dict(cycles.failures),
        "rss_mb": [round(each / 1e6, 1) for each in cycles.rss_bytes[:: max(1, len(cycles.rss_bytes) // 20)]],
        "loaded": server.metric("penstock_loads_total", event="loaded"),
        "idle": server.metric("penstock_loads_total", model=IDLE_MODEL, event="idle"),
        "load_failures": server.metric("penstock_loads_total", event="failed"),
    }
