"""`penstock chat` in a terminal and from a pipe, and `penstock generate`, against a small server."""

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.cli.generation.generate_command import MAX_TOKENS
from tests.writer import PARTS, Writer, writing

STORY = "".join(PARTS)
COMMAND = (sys.executable, "-m", "penstock")
WITHIN_S = 60.0


@pytest.fixture
async def writer() -> AsyncIterator[Writer]:
    async with writing() as found:
        yield found


class Terminal:
    """A command in a pseudo-terminal, and the keys that a user types."""

    def __init__(self) -> None:
        self._own, self._its = pty.openpty()
        os.set_blocking(self._own, False)
        self._shown = b""
        self._seen = 0

    async def run(self, *arguments: str) -> asyncio.subprocess.Process:
        its = self._its
        self.process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *arguments,
            stdin=its,
            stdout=its,
            stderr=its,
            env={**os.environ, "TERM": "dumb"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # programs in the background ignore SIGINT
        )
        os.close(its)
        return self.process

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    async def until(self, text: str) -> None:
        """Wait until the text is shown after the text that was awaited before."""
        async with asyncio.timeout(WITHIN_S):
            while (found := self._shown.find(text.encode(), self._seen)) < 0:
                await asyncio.sleep(0.01)
                try:
                    self._shown += os.read(self._own, 4096)
                except BlockingIOError:
                    continue
        self._seen = found + len(text)

    def close(self) -> None:
        os.close(self._own)


async def test_a_conversation_in_a_terminal_can_be_interrupted(writer: Writer, tmp_path: Path) -> None:
    terminal = Terminal()
    chat = await terminal.run("chat", "--model", "m", "--server", writer.address)
    try:
        await terminal.until("> ")
        terminal.type("tell me a story\r")
        await terminal.until(STORY)
        await terminal.until("> ")
        terminal.type("/model silent\r")
        await terminal.until("the model is silent")
        terminal.type("another\r")
        await terminal.until(PARTS[0])
        chat.send_signal(signal.SIGINT)  # stops the answer; the server receives a cancellation
        await terminal.until("(stopped)")
        await asyncio.wait_for(writer.ended.wait(), WITHIN_S)
        await terminal.until("> ")
        chat.send_signal(signal.SIGINT)  # discards the line only
        await terminal.until("> ")
        terminal.type("/system Be brief\r")
        await terminal.until("system message set")
        terminal.type(f"/save {tmp_path / 'talk.json'}\r")
        await terminal.until("saved to")
        terminal.type("\x04")
        assert await asyncio.wait_for(chat.wait(), WITHIN_S) == 0
    finally:
        if chat.returncode is None:
            chat.kill()
        terminal.close()
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [each["content"] for each in messages] == ["Be brief", "tell me a story", STORY, "another", PARTS[0]]


async def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), WITHIN_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_conversation_from_a_pipe_prints_single_answers(writer: Writer) -> None:
    options = ("--model", "m", "--server", writer.address)
    given = "hello\n/system Be brief\nagain\n"
    piped, whole, streamed, cut, late = await asyncio.gather(
        run("chat", *options, "--temperature", "0", stdin=given),
        run("generate", "Once", *options, "--json", "-n", "2"),
        run("generate", *options, "--stop", "a", "--stop", "b", stdin="Once\n"),
        run("generate", "Once", *options, "--max-tokens", "3"),
        run("generate", "Once", "--model", "silent", "--server", writer.address, "--timeout", "2"),
    )
    context = "penstock: the answer was cut off after 3 tokens: the model's context or settings allow no more\n"
    assert piped == (0, f"{STORY}\nsystem message set\n{STORY}\n", 2 * context)
    chats = [each for each in writer.requests if each.inputs[0].name == "messages"]
    assert [len(json.loads(each.raw_input_contents[0][4:])) for each in chats] == [1, 4]
    assert chats[0].parameters["temperature"].double_param == 0.0
    assert len({each.parameters["session_id"].string_param for each in chats}) == 1  # the same worker
    found = json.loads(whole[1])
    assert (found["text"], found["usage"]["completion_tokens"], len(found["choices"])) == (STORY, 6, 2)
    assert streamed == (0, STORY + "\n", context)
    assert cut == (0, STORY + "\n", "penstock: the answer was cut off after 3 tokens: allow more with --max-tokens\n")
    early = "penstock: the timeout ended this answer early: give a longer --timeout, or a lower --max-tokens\n"
    assert late == (2, PARTS[0] + "\n", early)
    (prompt,) = [each for each in writer.requests if "stop" in each.parameters]
    assert prompt.raw_input_contents[0][4:] == b"Once"
    assert prompt.parameters["max_tokens"].int64_param == MAX_TOKENS
    assert prompt.parameters["stop"].string_param == '["a", "b"]'
