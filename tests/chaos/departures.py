"""Stop workers under load with SIGSTOP or SIGTERM: no request may fail."""

import os
import signal
from collections.abc import Awaitable, Callable

from benchmarks.server import ServerProcess
from tests.chaos.checked_load import CheckedLoad, EchoQuestion
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import HEAVY, add_echo

HANG_S = 120.0  # short enough that the suspended worker is not replaced
ANSWERS_AROUND_FAULT = 100  # answers before and after each fault
CALLERS = 96  # more callers than jobs that run at once, so that jobs wait at the worker
Fault = Callable[[ServerProcess, CheckedLoad, int], Awaitable[None]]


async def stop(plan: ChaosPlan) -> Result:
    """Suspend a worker for more than five seconds: its jobs must move, and its late answers be ignored."""
    add_echo(plan.folder / "models", HEAVY)
    settings = {"data_plane": {"hang_s": HANG_S}}
    with ServerProcess(plan.folder / "models", plan.folder / "stop", "--workers", "2", settings=settings) as server:
        result = await _run_fault("stop", server, stop_worker, 1 if plan.is_quick else 5)
        result.details["retries"] = server.metric("penstock_retries_total", reason="worker_lost")
        result.details["late_replies"] = server.metric("penstock_late_replies_total")
    return result


async def hand_back(plan: ChaosPlan) -> Result:
    """Send SIGTERM to a worker: it must finish running jobs and hand back waiting ones."""
    # With a model that must never run twice, a job lost in transit could not be repeated.
    add_echo(plan.folder / "models", HEAVY, is_idempotent=False)
    with ServerProcess(plan.folder / "models", plan.folder / "hand_back", "--workers", "2") as server:
        result = await _run_fault("hand_back", server, end_worker, 4 if plan.is_quick else 10, CALLERS)
        result.details["handed_back"] = server.metric("penstock_retries_total", reason="handed_back")
        result.details["worker_lost"] = server.metric("penstock_retries_total", reason="worker_lost")
    return result


async def stop_worker(server: ServerProcess, load: CheckedLoad, _: int) -> None:
    workers = await server.wait_all_workers()
    victim = min(workers)
    await load.answered_more(ANSWERS_AROUND_FAULT)
    os.kill(workers[victim], signal.SIGSTOP)
    try:
        await server.wait_workers(lambda ready: victim not in ready)
        await load.answered_more(ANSWERS_AROUND_FAULT)
    finally:
        os.kill(workers[victim], signal.SIGCONT)
    await server.wait_workers(lambda ready: victim in ready)
    await load.answered_more(ANSWERS_AROUND_FAULT)


async def end_worker(server: ServerProcess, load: CheckedLoad, number: int) -> None:
    await load.answered_more(ANSWERS_AROUND_FAULT)
    await server.replace_worker(number, signal.SIGTERM)
    await load.answered_more(ANSWERS_AROUND_FAULT)


async def _run_fault(name: str, server: ServerProcess, fault: Fault, count: int, callers: int = 32) -> Result:
    await server.wait_all_workers()
    async with CheckedLoad(server.grpc, [EchoQuestion()], callers) as load:
        for number in range(count):
            await fault(server, load, number)
    result = Result(details=load.tally.details())
    result.must(f"{name}_failed", load.tally.failed, high=0)
    result.must(f"{name}_duplicates", load.tally.duplicates, high=0)
    return result
