"""Workers that hang (SIGSTOP) or are asked to leave (SIGTERM) under load: nobody may notice."""

import os
import signal
from collections.abc import Awaitable, Callable

from benchmarks.chaos.checked_load import CheckedLoad, EchoQuestion
from benchmarks.chaos.report import ChaosPlan, Result
from benchmarks.chaos.repository import HEAVY, add_echo
from benchmarks.server import ServerProcess

SILENCE_S = 2.0
HANG_S = 120.0  # the one that hangs comes back: it is not exchanged
AROUND = 100  # answers before and after each fault
CALLERS = 96  # more than the workers run at once, so that some wait there
Fault = Callable[[ServerProcess, CheckedLoad, int], Awaitable[None]]


async def stop(plan: ChaosPlan) -> Result:
    """A worker hangs for longer than `silence_s`: its jobs move, what it says later is not heard."""
    add_echo(plan.folder / "models", HEAVY)
    settings = {"data_plane": {"silence_s": SILENCE_S, "hang_s": HANG_S}}
    with ServerProcess(plan.folder / "models", plan.folder / "stop", "--workers", "2", settings=settings) as server:
        result = await _strike("stop", server, stop_worker, 1 if plan.is_quick else 5)
        result.details["retries"] = server.metric("penstock_retries_total", reason="worker_lost")
        result.details["late_replies"] = server.metric("penstock_late_replies_total")
    return result


async def hand_back(plan: ChaosPlan) -> Result:
    """A worker that is asked to leave ends what runs and hands back what waits."""
    # Of a model that must never run twice, a job that got lost on the way could not be saved by a retry.
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
