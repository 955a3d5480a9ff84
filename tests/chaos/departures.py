"""Workers that hang (SIGSTOP) or are asked to leave (SIGTERM) under load: no caller notices."""

import os
import signal
from collections.abc import Awaitable, Callable

from benchmarks.server import ServerProcess
from tests.chaos.checked_load import CheckedLoad, EchoQuestion
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import HEAVY, add_echo

HANG_S = 120.0  # the hanging worker resumes: it is not replaced
AROUND = 100  # answers before and after each fault
CALLERS = 96  # more than the workers run at once, so that some jobs wait there
Fault = Callable[[ServerProcess, CheckedLoad, int], Awaitable[None]]


async def stop(plan: ChaosPlan) -> Result:
    """Stop a worker for more than five seconds: its jobs move, and its late answers are ignored."""
    add_echo(plan.folder / "models", HEAVY)
    settings = {"data_plane": {"hang_s": HANG_S}}
    with ServerProcess(plan.folder / "models", plan.folder / "stop", "--workers", "2", settings=settings) as server:
        result = await _strike("stop", server, stop_worker, 1 if plan.is_quick else 5)
        result.details["retries"] = server.metric("penstock_retries_total", reason="worker_lost")
        result.details["late_replies"] = server.metric("penstock_late_replies_total")
    return result


async def hand_back(plan: ChaosPlan) -> Result:
    """Ask a worker to leave: it ends running jobs and hands back waiting ones."""
    # With a model that must never run twice, a job lost in transit could not be repeated.
    add_echo(plan.folder / "models", HEAVY, is_idempotent=False)
    with ServerProcess(plan.folder / "models", plan.folder / "hand_back", "--workers", "2") as server:
        result = await _strike("hand_back", server, end_worker, 4 if plan.is_quick else 10, CALLERS)
        result.details["handed_back"] = server.metric("penstock_retries_total", reason="handed_back")
        result.details["worker_lost"] = server.metric("penstock_retries_total", reason="worker_lost")
    return result


async def stop_worker(server: ServerProcess, load: CheckedLoad, _: int) -> None:
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


async def end_worker(server: ServerProcess, load: CheckedLoad, number: int) -> None:
    await load.answered_more(AROUND)
    await server.replace_worker(number, signal.SIGTERM)
    await load.answered_more(AROUND)


async def _strike(name: str, server: ServerProcess, fault: Fault, count: int, callers: int = 32) -> Result:
    await server.wait_all_workers()
    async with CheckedLoad(server.grpc, [EchoQuestion()], callers) as load:
        for number in range(count):
            await fault(server, load, number)
    result = Result(details=load.tally.details())
    result.must(f"{name}_failed", load.tally.failed, high=0)
    result.must(f"{name}_duplicates", load.tally.duplicates, high=0)
    return result
