"""Kill workers while sessions run: each request must be answered once, in order and correctly.

Two independent records show the order: the position in the session that the server reports for a request, and the time
of the answer, which the server sends before it runs the next request of the session.
"""

import asyncio
import signal
import time
from collections.abc import Callable
from math import inf

from benchmarks.server import ServerProcess
from benchmarks.waiting import until
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import add_echo
from tests.chaos.session_load import SessionClient, SessionTally, Shape

WORKERS = 2
BACK_S = 90.0  # time for a killed worker to return after the load has ended
NO_WORK = 0  # layers of the echo model, which should take no time


async def run(plan: ChaosPlan) -> Result:
    shape = Shape(sessions=2_000, kills=2) if plan.is_quick else Shape()
    add_echo(plan.folder / "models", NO_WORK)
    with ServerProcess(plan.folder / "models", plan.folder / "sessions", "--workers", str(WORKERS)) as server:
        await server.wait_all_workers()
        started = time.monotonic()
        tally = await play(server, shape, plan.say)
        result = Result(details=tally.details())
        result.details["requests_per_s"] = round(tally.answered / (time.monotonic() - started))
        result.details["retries"] = server.metric("penstock_retries_total", reason="worker_lost")
        result.details["late_replies"] = server.metric("penstock_late_replies_total")
    result.must("session_violations", tally.violations, high=0)
    result.must("session_answers", tally.answered, low=shape.sessions * shape.steps)
    result.must("session_kills", tally.kills, low=shape.kills, high=shape.kills)
    return result


async def play(server: ServerProcess, shape: Shape, say: Callable[[str], None]) -> SessionTally:
    """Run all sessions while workers are killed; retry each request until it is answered."""
    tally = SessionTally()
    killer = asyncio.create_task(_kill_meanwhile(server, shape, tally, say))
    try:
        await asyncio.gather(*(SessionClient(server.grpc, n, shape, tally).run() for n in range(shape.clients)))
        await asyncio.wait([killer], timeout=BACK_S)
    finally:
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
    return tally


async def _kill_meanwhile(server: ServerProcess, shape: Shape, tally: SessionTally, say: Callable[[str], None]) -> None:
    def compute_goal() -> int:
        return shape.sessions * shape.steps * (tally.kills + 1) // (shape.kills + 1)

    while tally.kills < shape.kills:
        await until(lambda: tally.answered >= compute_goal(), f"{compute_goal():,} are answered", inf)
        await server.replace_worker(tally.kills, signal.SIGKILL)
        tally.kills += 1
        say(f"killed a worker ({tally.kills} of {shape.kills}) after {tally.answered:,} answers")
