"""What events call: real commands and a real HTTP server, signed, tried again, bounded."""

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
from penstock.manager.events import Event
from penstock.manager.triggers import MAX_WAITING, Triggers

SECRET = "a secret of sixteen or more"
ROLLED_BACK = Event(at=7.5, kind="rollout_rolled_back", subject="m", text="it failed")
WRITE = "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read() + b'\\n')"


@asynccontextmanager
async def triggering(*settings: dict[str, Any]) -> AsyncIterator[Triggers]:
    triggers = Triggers([TriggerSettings.model_validate(each) for each in settings], first_pause_s=0.01)
    triggers.start()
    yield triggers
    await triggers.close()


class Hook:
    """Answers with these statuses in turn, and then with the last; None: never."""

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
        for writer in self._writers:  # one that was cancelled before it began has closed nothing
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


async def test_a_command_gets_the_event_and_no_shell(tmp_path: Path) -> None:
    file = tmp_path / "told; touch nothing"
    command = [sys.executable, "-c", WRITE, str(file)]
    async with triggering({"on": ["rollout_*"], "command": command}) as triggers:
        triggers.told(Event(at=1.0, kind="worker_alive", subject="w", text=""))
        triggers.told(ROLLED_BACK)
        await until(lambda: file.exists() and file.read_bytes().endswith(b"\n"))
    assert [json.loads(line) for line in file.read_text().splitlines()] == [ROLLED_BACK.model_dump()]


async def test_a_url_gets_it_signed() -> None:
    hook = Hook(204)
    async with hook.open() as url, triggering({"url": url, "secret": SECRET}) as triggers:
        triggers.told(ROLLED_BACK)
        await until(lambda: hook.heard)
    headers, body = hook.heard[0]
    assert json.loads(body) == ROLLED_BACK.model_dump()
    assert headers["x-penstock-timestamp"] == "7.5"
    expected = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    assert headers["x-penstock-signature"] == f"sha256={expected}"


@pytest.mark.parametrize(
    ("statuses", "calls"), [((500, 503, 200), 3), ((500,), 3), ((429, 200), 2), ((404,), 1), ((302,), 1)]
)
async def test_what_may_pass_is_tried_again(statuses: tuple[int, ...], calls: int) -> None:
    hook, ready = Hook(*statuses), Hook(200)
    async with (
        hook.open() as url,
        ready.open() as other,
        triggering({"url": url, "secret": SECRET}, {"url": other, "secret": SECRET}) as triggers,
    ):
        triggers.told(ROLLED_BACK)
        await until(lambda: len(hook.heard) == calls and ready.heard)
        triggers.told(ROLLED_BACK)  # goes on after one that was given up
        await until(lambda: len(hook.heard) > calls)


async def test_who_does_not_answer_is_given_up(tmp_path: Path) -> None:
    hook, file = Hook(None), tmp_path / "late"
    sleepy = [sys.executable, "-c", f"import time; time.sleep(60); open({str(file)!r}, 'w')"]
    limits = {"timeout_s": 0.3, "attempts": 2}
    async with (
        hook.open() as url,
        triggering({"url": url, "secret": SECRET, **limits}, {"command": sleepy, **limits}) as triggers,
    ):
        triggers.told(ROLLED_BACK)
        await until(lambda: len(hook.heard) == 2)
    assert not file.exists()


async def test_what_a_command_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {file}; wait"]
    async with triggering({"command": command, "timeout_s": 0.3, "attempts": 1}) as triggers:
        triggers.told(ROLLED_BACK)
        await until(lambda: file.exists() and file.read_text().endswith("\n"))
        await until(lambda: not is_running(int(file.read_text())))


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_who_answers_a_byte_now_and_then_keeps_no_thread() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while not reader.at_eof():
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, triggering({"url": url, "secret": SECRET, "timeout_s": 0.3, "attempts": 1}) as triggers:
        triggers.told(ROLLED_BACK)
        await asyncio.wait_for(ended.wait(), 20)


async def test_a_name_that_is_none_ends_no_trigger(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with triggering({"url": "http://a..b/", "secret": SECRET, "attempts": 1}) as triggers:
            for told in (1, 2):
                triggers.told(ROLLED_BACK)
                await until(lambda count=told: len(logs) == count)  # type: ignore[misc]
    assert {line["event"] for line in logs} == {"trigger_failed"}


async def test_what_waits_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "told"
    triggers = Triggers([TriggerSettings(command=(sys.executable, "-c", WRITE, str(file)))])
    for number in range(MAX_WAITING + 10):
        triggers.told(ROLLED_BACK.model_copy(update={"at": float(number)}))
    assert len(triggers._triggers[0]._waiting) == MAX_WAITING
    triggers.start()
    await until(lambda: file.exists() and file.read_bytes().count(b"\n") >= 1)
    await triggers.close()
    assert json.loads(file.read_text().splitlines()[0])["at"] == 10.0, "the oldest went"


async def test_a_command_that_is_not_there_is_told_in_the_log(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with triggering({"command": [str(tmp_path / "nothing")], "attempts": 1}) as triggers:
            triggers.told(ROLLED_BACK)
            await until(lambda: logs)
    assert [line["event"] for line in logs] == ["trigger_failed"]


@pytest.mark.parametrize("turns", range(8))
async def test_triggers_end_while_a_command_fails_to_start(tmp_path: Path, turns: int) -> None:
    async with asyncio.timeout(10), triggering({"command": [str(tmp_path / "nothing")]}) as triggers:
        triggers.told(ROLLED_BACK)
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
        ({"command": ["x"], "attempts": 0}, "greater than"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TriggerSettings.model_validate(wrong)


def test_a_secret_is_not_shown() -> None:
    config = Config.model_validate({"triggers": [{"url": "http://h/", "secret": SECRET}]})
    assert SECRET not in repr(config)
    assert SECRET not in config.model_dump_json()
