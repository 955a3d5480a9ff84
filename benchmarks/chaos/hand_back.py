"""A worker is asked to leave (SIGTERM) under load: it ends what runs and hands back what waits."""

import signal

from benchmarks.chaos.checked_load import CheckedLoad, EchoQuestion
from benchmarks.chaos.report import ChaosPlan, Result
from benchmarks.chaos.repository import HEAVY, add_echo
from benchmarks.server import ServerProcess

AROUND = 100  # answers before and after each fault
CALLERS = 96  # more than the workers run at once, so that some wait there


async def run(plan: ChaosPlan) -> Result:
    # Of a model that must never run twice, a job that got lost on the way could not be saved by a retry.
    add_echo(plan.folder / "models", HEAVY, is_idempotent=False)
    count = 4 if plan.is_quick else 10
    with ServerProcess(plan.folder / "models", plan.folder / "hand_back", "--workers", "2") as server:
        await server.wait_all_workers()
        async with CheckedLoad(server.grpc, [EchoQuestion()], CALLERS) as load:
            for number in range(count):
                await end_worker(server, load, number)
        result = Result(details=load.tally.details())
        result.details["handed_back"] = server.metric("penstock_retries_total", reason="handed_back")
        result.details["worker_lost"] = server.metric("penstock_retries_total", reason="worker_lost")
    result.must("hand_back_failed", load.tally.failed, high=0)
    result.must("hand_back_duplicates", load.tally.duplicates, high=0)
    return result


async def end_worker(server: ServerProcess, load: CheckedLoad, number: int) -> None:
    await load.answered_more(AROUND)
    await server.replace_worker(number, signal.SIGTERM)
    await load.answered_more(AROUND)
