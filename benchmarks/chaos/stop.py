"""A worker hangs (SIGSTOP) for longer than `silence_s` under load: its jobs move, what it says later is not heard."""

import os
import signal

from benchmarks.chaos.checked_load import CheckedLoad, EchoQuestion
from benchmarks.chaos.report import ChaosPlan, Result
from benchmarks.chaos.repository import HEAVY, add_echo
from benchmarks.server import ServerProcess

SILENCE_S = 2.0
AROUND = 100  # answers before and after each fault


async def run(plan: ChaosPlan) -> Result:
    add_echo(plan.folder / "models", HEAVY)
    settings = {"data_plane": {"silence_s": SILENCE_S}}
    with ServerProcess(plan.folder / "models", plan.folder / "stop", "--workers", "2", settings=settings) as server:
        await server.wait_all_workers()
        async with CheckedLoad(server.grpc, [EchoQuestion()]) as load:
            for _ in range(1 if plan.is_quick else 5):
                await stop_worker(server, load)
        result = Result(details=load.tally.details())
        result.details["retries"] = server.metric("penstock_retries_total", reason="worker_lost")
        result.details["late_replies"] = server.metric("penstock_late_replies_total")
    result.must("stop_failed", load.tally.failed, high=0)
    result.must("stop_duplicates", load.tally.duplicates, high=0)
    return result


async def stop_worker(server: ServerProcess, load: CheckedLoad) -> None:
    workers = await server.wait_all_workers()
    victim = min(workers)
    await load.answered_more(AROUND)
    os.kill(workers[victim], signal.SIGSTOP)
    try:
        await server.wait_workers(lambda ready: victim not in ready)
        await load.answered_more(AROUND)
    finally:
        os.kill(workers[victim], signal.SIGCONT)
    await server.wait_workers(lambda ready: victim in ready)
    await load.answered_more(AROUND)
