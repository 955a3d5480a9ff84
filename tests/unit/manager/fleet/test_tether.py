"""A child and its supervisor as real processes, with a real socket."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.waiting import until
from penstock.core.errors import ConfigError
from penstock.manager.fleet.tether import Tether, TetheredProcess

CHILD = """
import asyncio, sys, time
from penstock.manager.fleet.tether import TetheredProcess
from penstock.core.errors import ConfigError
tether = TetheredProcess(int(sys.argv[1]))
async def main():
    tether.attach(5.0)
    exec(sys.argv[2])
    await asyncio.sleep(60)
asyncio.run(main())
"""


@asynccontextmanager
async def child(does: str) -> AsyncIterator[tuple[Tether, asyncio.subprocess.Process, list[dict[str, Any]]]]:
    heard: list[dict[str, Any]] = []
    tether = Tether(heard.append)
    fd = tether.theirs.fileno()
    started = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, str(fd), does, pass_fds=(fd,))
    tether.close_child_end()
    try:
        yield tether, started, heard
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()
        tether.close()


async def test_a_child_sends_heartbeats_and_its_state() -> None:
    async with child("tether.report_open(); tether.report_failure(ConfigError('no such port'))") as (_, _, heard):
        await until(lambda: len(heard) >= 5, "it beats")
    said = {key: value for words in heard for key, value in words.items()}
    assert said["open"] is True
    assert said["failed"] == {"code": "config_error", "message": "no such port"}
    assert {words["loop_s"] for words in heard if "loop_s" in words} <= {None, 0.0}


async def test_a_loop_that_does_not_run_is_reported() -> None:
    async with child("time.sleep(60)") as (_, _, heard):
        await until(lambda: any((words.get("loop_s") or 0) >= 1.0 for words in heard), "its loop is late")


async def test_a_child_ends_with_its_supervisor() -> None:
    async with child("pass") as (tether, started, heard):
        await until(lambda: heard, "it is there")
        tether.close()
        assert await asyncio.wait_for(started.wait(), 20) != 0


async def test_a_supervisor_that_does_not_read_delays_no_child() -> None:
    says_much = "[tether.report_open() for _ in range(10_000)]; sys.exit(7)"
    async with child(says_much) as (tether, started, _):
        asyncio.get_running_loop().remove_reader(tether._ours)
        assert await asyncio.wait_for(started.wait(), 20) == 7


async def test_the_supervisor_reads_reports_after_the_childs_end() -> None:
    async with child("tether.report_failure(ConfigError('the end')); sys.exit(2)") as (tether, started, heard):
        asyncio.get_running_loop().remove_reader(tether._ours)
        await started.wait()
        tether.close()
        assert any("failed" in words for words in heard)


def test_without_a_supervisor_reports_are_dropped() -> None:
    alone = TetheredProcess(None)
    alone.report_open()
    assert not alone.report_failure(ConfigError("why"))
