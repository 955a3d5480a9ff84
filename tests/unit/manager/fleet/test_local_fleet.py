"""Real processes that are restarted, replaced when they hang, and stopped."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import psutil
import pytest
from structlog.testing import capture_logs

from benchmarks.waiting import until
from penstock.core.config import DataPlane
from penstock.core.errors import ConfigError, InternalError
from penstock.manager.fleet.local_fleet import LocalFleet
from penstock.manager.fleet.role_processes import FleetRole

SETTINGS = DataPlane(hang_s=1.0)
SLEEPER = (sys.executable, "-c", "import time; time.sleep(60)")
CHILD = """
import asyncio, sys
from penstock.manager.fleet.tether import TetheredProcess
from penstock.core.errors import ConfigError
tether = TetheredProcess(int(sys.argv[-1]))
async def main():
    tether.attach(5.0)
    exec(sys.argv[1])
    await asyncio.sleep(60)
asyncio.run(main())
"""


def child(does: str) -> tuple[str, ...]:
    return (sys.executable, "-c", CHILD, does)


@pytest.fixture
async def exits() -> list[tuple[str, str]]:
    return []


@pytest.fixture
async def supervisor(exits: list[tuple[str, str]]) -> AsyncIterator[LocalFleet]:
    supervisor = LocalFleet(SETTINGS, lambda name, why: exits.append((name, why)), first_backoff_s=0.01)
    yield supervisor
    await supervisor.close()


async def test_a_killed_process_is_restarted_and_stop_ends_it(
    supervisor: LocalFleet, exits: list[tuple[str, str]]
) -> None:
    await supervisor.start(FleetRole("sleeper", SLEEPER))
    first = await _pid(supervisor, 0)
    os.kill(first, signal.SIGKILL)
    assert await _pid(supervisor, first) != first
    assert exits == [("sleeper", "died")]
    await supervisor.stop(["sleeper"], 5.0)
    assert supervisor.list_pids() == {}
    assert exits == [("sleeper", "died"), ("sleeper", "stopped")]


async def test_a_stopped_process_is_replaced(supervisor: LocalFleet, exits: list[tuple[str, str]]) -> None:
    await supervisor.start(FleetRole("sleeper", child("tether.report_open()"), reports_open=True))
    await supervisor.wait_until_open()
    first = await _pid(supervisor, 0)
    await asyncio.sleep(1.0)  # it has reported that its loop runs
    os.kill(first, signal.SIGSTOP)
    assert await _pid(supervisor, first) != first
    assert exits == [("sleeper", "hung")]


async def test_child_processes_of_a_killed_process_end_with_it(supervisor: LocalFleet) -> None:
    starts = "import subprocess; subprocess.Popen(['sleep', '600'], process_group=0)"
    await supervisor.start(FleetRole("sleeper", child(starts)))
    main = psutil.Process(await _pid(supervisor, 0))
    await until(main.children)
    (left,) = main.children()
    main.kill()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [left], 60)
    assert gone == [left]


async def test_only_named_processes_are_stopped(supervisor: LocalFleet) -> None:
    await supervisor.start(FleetRole("sleeper", SLEEPER))
    await supervisor.start(FleetRole("other", SLEEPER))
    await until(lambda: len(supervisor.list_pids()) == 2)
    await supervisor.stop(["other"], 5.0)
    assert supervisor.list_pids().keys() == {"sleeper"}


async def test_a_process_that_ignores_sigterm_is_killed(supervisor: LocalFleet) -> None:
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); tether.report_open()"
    await supervisor.start(FleetRole("sleeper", child(ignores), reports_open=True))
    await supervisor.wait_until_open()
    await supervisor.stop(["sleeper"], 0.1)
    assert supervisor.list_pids() == {}


async def test_the_reason_of_an_endpoint_that_cannot_open_is_reported(supervisor: LocalFleet) -> None:
    fails = child("tether.report_failure(ConfigError('the port is taken')); sys.exit(2)")
    await supervisor.start(FleetRole("endpoint", fails, reports_open=True))
    with pytest.raises(ConfigError, match="the port is taken"):
        await supervisor.wait_until_open()


async def test_a_process_that_ends_before_its_endpoint_is_open_fails_the_start(supervisor: LocalFleet) -> None:
    await supervisor.start(FleetRole("endpoint", child("sys.exit(7)"), reports_open=True))
    with pytest.raises(InternalError, match=r"endpoint ended \(7\) before its endpoint was open"):
        await supervisor.wait_until_open()


async def test_the_fleet_is_ready_when_all_reporting_processes_are(supervisor: LocalFleet) -> None:
    told = 'tether.report_problem("it loads"); asyncio.get_running_loop().call_later(0.5, tether.report_problem, "")'
    await supervisor.start(FleetRole("silent", SLEEPER))
    await supervisor.start(FleetRole("telling", child(told), reports_ready=True))
    seen: list[str] = []
    while not seen or seen[-1]:
        problem = await supervisor.describe_problem()
        if problem not in seen[-1:]:
            seen.append(problem)
        await asyncio.sleep(0.01)
    assert seen[0] == "silent: starting"
    assert seen[-3:] == ["telling: starting", "telling: it loads", ""]


async def test_a_command_that_cannot_be_started_is_retried(
    supervisor: LocalFleet, exits: list[tuple[str, str]]
) -> None:
    await supervisor.start(FleetRole("nothing", ("/no/such/program",)))
    await until(lambda: len(exits) > 1, "it is tried again")


async def test_a_failing_exit_callback_does_not_prevent_a_restart(exits: list[tuple[str, str]]) -> None:
    def tell(name: str, why: str) -> None:
        exits.append((name, why))
        raise RuntimeError("told badly")

    supervisor = LocalFleet(SETTINGS, tell)
    with capture_logs():
        await supervisor.start(FleetRole("brief", (sys.executable, "-c", "pass")))
        await until(lambda: len(exits) > 1, "it is started again")
        await supervisor.close()


async def _pid(supervisor: LocalFleet, other_than: int) -> int:
    async with asyncio.timeout(20):
        while supervisor.list_pids().get("sleeper", other_than) == other_than:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return supervisor.list_pids()["sleeper"]
