"""Commands and webhooks that events trigger: signed, retried and bounded, with a real HTTP server."""

import asyncio
import hashlib
import hmac
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from benchmarks.waiting import until
from penstock.core.config import Config, TriggerSettings
from penstock.features.events.triggers import ATTEMPT_S, ATTEMPTS, MAX_WAITING, Triggers, run_command
from penstock.manager.event_log import Event

SECRET = "a secret of sixteen or more"
ROLLED_BACK = Event(at=7.5, kind="rollout_rolled_back", subject="m", text="it failed")
WRITE = "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read() + b'\\n')"


@asynccontextmanager
async def triggering(*settings: dict[str, Any], attempt_s: float = ATTEMPT_S) -> AsyncIterator[Triggers]:
    triggers = Triggers([TriggerSettings.model_validate(each) for each in settings], 0.01, attempt_s)
    triggers.start()
    yield triggers
    await triggers.close()


class Hook:
    """Answers with these statuses in turn, then repeats the last; None means no answer."""

    def __init__(self, *statuses: int | None) -> None:
        self._statuses = list(statuses)
        self.heard: list[tuple[dict[str, str], bytes]] = []
        self._answering: set[asyncio.Task[Any]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook?team=ml"
        server.close()
        await server.wait_closed()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        for writer in self._writers:  # a connection that was cancelled before it began has closed nothing
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answering.add(asyncio.create_task(self._answer(reader, writer)))
        self._writers.append(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._give(reader, writer)
        finally:
            writer.close()

    async def _give(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        assert head[0] == "POST /hook?team=ml HTTP/1.1"
        self.heard.append((headers, await reader.readexactly(int(headers["content-length"]))))
        status = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        if status is not None:
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\nLocation: http://127.0.0.1:1/\r\n\r\n".encode())
            await writer.drain()
        else:
            await reader.read()


async def test_a_command_gets_the_event_without_a_shell(tmp_path: Path) -> None:
    file = tmp_path / "told; touch nothing"
    command = [sys.executable, "-c", WRITE, str(file)]
    async with triggering({"on": ["rollout_*"], "command": command}) as triggers:
        triggers.receive(Event(at=1.0, kind="worker_alive", subject="w", text=""))
        triggers.receive(ROLLED_BACK)
        await until(lambda: file.exists() and file.read_bytes().endswith(b"\n"))
    assert [json.loads(line) for line in file.read_text().splitlines()] == [ROLLED_BACK.model_dump()]


async def test_a_url_gets_a_signed_event() -> None:
    hook = Hook(204)
    async with hook.open() as url, triggering({"url": url, "secret": SECRET}) as triggers:
        triggers.receive(ROLLED_BACK)
        await until(lambda: hook.heard)
    headers, body = hook.heard[0]
    assert json.loads(body) == ROLLED_BACK.model_dump()
    assert headers["x-penstock-timestamp"] == "7.5"
    expected = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    assert headers["x-penstock-signature"] == f"sha256={expected}"


@pytest.mark.parametrize(
    ("statuses", "calls"), [((500, 503, 200), 3), ((500,), 3), ((429, 200), 2), ((404,), 1), ((302,), 1)]
)
async def test_temporary_failures_are_retried(statuses: tuple[int, ...], calls: int) -> None:
    hook, ready = Hook(*statuses), Hook(200)
    async with (
        hook.open() as url,
        ready.open() as other,
        triggering({"url": url, "secret": SECRET}, {"url": other, "secret": SECRET}) as triggers,
    ):
        triggers.receive(ROLLED_BACK)
        await until(lambda: len(hook.heard) == calls and ready.heard)
        triggers.receive(ROLLED_BACK)  # continues after an event that was given up
        await until(lambda: len(hook.heard) > calls)


async def test_an_attempt_without_an_answer_times_out(tmp_path: Path) -> None:
    hook, file = Hook(None), tmp_path / "late"
    sleepy = [sys.executable, "-c", f"import time; time.sleep(60); open({str(file)!r}, 'w')"]
    async with (
        hook.open() as url,
        triggering({"url": url, "secret": SECRET}, {"command": sleepy}, attempt_s=0.3) as triggers,
    ):
        triggers.receive(ROLLED_BACK)
        await until(lambda: len(hook.heard) == ATTEMPTS)
    assert not file.exists()


async def test_child_processes_of_a_command_end_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {file}; wait"]
    async with triggering({"command": command}, attempt_s=0.3) as triggers:
        triggers.receive(ROLLED_BACK)
        await until(lambda: file.exists() and file.read_text().endswith("\n"))
        await until(lambda: not is_running(int(file.read_text())))


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_server_that_sends_single_bytes_blocks_no_thread() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while not reader.at_eof():
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()
        ended.append(reader)

    ended: list[asyncio.StreamReader] = []
    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, triggering({"url": url, "secret": SECRET}, attempt_s=0.3) as triggers:
        triggers.receive(ROLLED_BACK)
        await until(lambda: len(ended) == ATTEMPTS)


async def test_an_unknown_host_ends_no_trigger(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with triggering({"url": "http://a..b/", "secret": SECRET}) as triggers:
            for told in (1, 2):
                triggers.receive(ROLLED_BACK)
                await until(lambda count=told: len(logs) == count)  # type: ignore[misc]
    assert {line["event"] for line in logs} == {"trigger_failed"}


async def test_the_number_of_waiting_events_is_limited(tmp_path: Path) -> None:
    file = tmp_path / "told"
    triggers = Triggers([TriggerSettings(command=(sys.executable, "-c", WRITE, str(file)))])
    for number in range(MAX_WAITING + 10):
        triggers.receive(ROLLED_BACK.model_copy(update={"at": float(number)}))
    assert len(triggers._triggers[0]._waiting) == MAX_WAITING
    triggers.start()
    await until(lambda: file.exists() and file.read_bytes().count(b"\n") >= 1)
    await triggers.close()
    assert json.loads(file.read_text().splitlines()[0])["at"] == 10.0, "the oldest event was dropped"


@pytest.mark.parametrize("turns", range(4))
async def test_a_killed_command_is_waited_for_after_a_second_cancellation(turns: int) -> None:
    before = psutil.Process().children()
    running = asyncio.create_task(run_command([sys.executable, "-c", "import time; time.sleep(60)"], b""))
    await until(lambda: len(psutil.Process().children()) > len(before))
    (command,) = set(psutil.Process().children()) - set(before)
    await asyncio.sleep(0.05)  # until the command gets its input
    running.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert not command.is_running()


async def test_a_missing_command_is_logged(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with triggering({"command": [str(tmp_path / "nothing")]}) as triggers:
            triggers.receive(ROLLED_BACK)
            await until(lambda: logs)
    assert [line["event"] for line in logs] == ["trigger_failed"]


@pytest.mark.parametrize("turns", range(8))
async def test_triggers_can_be_closed_while_a_command_fails_to_start(tmp_path: Path, turns: int) -> None:
    async with asyncio.timeout(10), triggering({"command": [str(tmp_path / "nothing")]}) as triggers:
        triggers.receive(ROLLED_BACK)
        for _ in range(turns):
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "a command or a url"),
        ({"command": ["x"], "url": "http://h/"}, "a command or a url"),
        ({"url": "http://h/"}, "needs a secret"),
        ({"url": "http://h/", "secret": "short"}, "needs a secret"),
        ({"url": "ftp://h/", "secret": SECRET}, "pattern"),
    ],
)
def test_contradictory_settings_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TriggerSettings.model_validate(wrong)


def test_a_secret_is_not_printed() -> None:
    config = Config.model_validate({"triggers": [{"url": "http://h/", "secret": SECRET}]})
    assert SECRET not in repr(config)
    assert SECRET not in config.model_dump_json()
