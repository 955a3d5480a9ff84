"""A real process that is restarted and ended."""

import asyncio
import os
import signal
import sys

from penstock.app.supervisor import Supervisor


async def test_a_killed_process_comes_back_and_stop_ends_it() -> None:
    exits: list[str] = []
    supervisor = Supervisor(0.01, 0.1, exits.append)
    supervisor.keep("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"])
    first = await _pid(supervisor, 0)
    os.kill(first, signal.SIGKILL)
    second = await _pid(supervisor, first)
    assert second != first
    assert exits == ["sleeper"]
    await supervisor.stop(5.0)
    assert supervisor._processes == {}


async def _pid(supervisor: Supervisor, other_than: int) -> int:
    async with asyncio.timeout(10):
        while True:
            process = supervisor._processes.get("sleeper")
            if process is not None and process.pid != other_than:
                return process.pid
            await asyncio.sleep(0.01)
