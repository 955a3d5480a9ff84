"""Callers of `/v1/completions` at any server, with the content and times of each answer."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEADLINE_S = 300.0


@dataclass(slots=True)
class AnswerTimes:
    """Times of one answer, in seconds since the first request."""

    due: float
    first: float = 0.0
    end: float = 0.0


@dataclass(frozen=True, slots=True)
class CompletionLoad:
    """A load of `callers` that wait for their answers or, if `callers` is 0, of requests at the times `due`."""

    prompts: Sequence[str]
    tokens: int
    callers: int = 0
    due: Sequence[float] = ()


async def ask_all(address: str, model: str, asking: CompletionLoad, is_streamed: bool) -> list[AnswerTimes]:
    began = time.perf_counter()
    waiting = iter(range(len(asking.prompts)))

    async def ask(index: int) -> AnswerTimes:
        due = asking.due[index] if asking.due else time.perf_counter() - began
        await asyncio.sleep(max(0.0, due - (time.perf_counter() - began)))
        told = AnswerTimes(due)
        body = {"model": model, "prompt": asking.prompts[index], "max_tokens": asking.tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": is_streamed}
        async for line in post(address, "/v1/completions", body):
            if line.startswith(b"data: {"):
                told.first = told.first or time.perf_counter() - began
            elif line.startswith(b"{") and (tokens := json.loads(line)["usage"]["completion_tokens"]) != asking.tokens:
                raise RuntimeError(f"an answer has {tokens} tokens instead of {asking.tokens}")
        told.end = time.perf_counter() - began
        return told

    async def caller(indices: Iterable[int]) -> list[AnswerTimes]:
        return [await ask(index) for index in indices]

    callers = [waiting] * asking.callers if asking.callers else [iter([index]) for index in waiting]
    async with asyncio.timeout(DEADLINE_S):
        found = await asyncio.gather(*(caller(indices) for indices in callers))
    return [told for one in found for told in one]


async def post(address: str, path: str, content: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """Send a request; yield the answer's lines. Without a client library, which would take CPU time from the engine."""
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection(*address.split(":"))
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read()).decode())
        async for line in reader:
            yield line
            if line.startswith(b"data: [DONE]"):  # not all servers close the connection at once
                return
    finally:
        writer.close()
