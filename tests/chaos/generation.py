"""Generate text while callers cancel, clients disconnect and workers die: the server must release all resources."""

import asyncio
import json
import random
import signal
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.repository import link_model
from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from penstock.client import AsyncClient
from penstock.core.errors import PenstockError, WorkerLost
from tests.chaos.report import ChaosPlan, Result

MODEL = "smollm2"
PROMPT = "The capital of France is"
MAX_TOKENS = 32
MAX_STAY_S = 0.8  # maximum time before a caller leaves
AT_ONCE = 24  # callers: three times as many as run
MAX_RUNNING = 8
CACHE_MB = 24  # a leak of a few generations would be visible
BLOCK_TOKENS = 32
IDLE_S = 60.0
ANSWER_S = 180.0  # enough for a worker to restart
STREAMS = 6  # streams that are open when a worker is killed
LONG_TOKENS = 64


async def run(plan: ChaosPlan) -> Result:
    cancelled, vanished = (200, 40) if plan.is_quick else (1000, 100)
    add_generator(plan.folder / "models", plan.models)
    result = Result()
    with ServerProcess(plan.folder / "models", plan.folder / "leave") as server:
        result.add("leave", await leave(server, cancelled, vanished, plan))
    with ServerProcess(plan.folder / "models", plan.folder / "kill", "--workers", "2") as server:
        result.add("kill", await kill(server, 1 if plan.is_quick else 5))
    return result


def add_generator(repository: Path, models: Path) -> None:
    """Add the shipped text-generation model, with a small cache."""
    link_model(
        models / MODEL,
        repository / MODEL,
        genai={"cache_mb": CACHE_MB},
        generate={"max_running": MAX_RUNNING, "max_tokens": 1024},
        residence={"load": "eager"},
    )


async def leave(server: ServerProcess, cancelled: int, vanished: int, plan: ChaosPlan) -> Result:
    """Cancel requests or disconnect at random moments: in the queue, before or after the first token."""
    await server.wait_all_workers()
    result = Result()
    rng = random.Random(1)
    async with AsyncClient(server.grpc) as client:
        before = await ask(client)
        await _call_repeatedly(
            AT_ONCE, AT_ONCE, lambda: _cancel(client, rng)
        )  # the first generation creates everything that is created only once
        await count_leftovers(server)
        memory = server.rss_bytes()
        ends = await _call_repeatedly(cancelled, AT_ONCE, lambda: _cancel(client, rng))
        plan.say(f"{cancelled} cancelled: {dict(ends)}")
        vanishing = await _call_repeatedly(vanished, AT_ONCE, lambda: _reset_connection(server.http_port, rng))
        plan.say(f"{vanished} vanished: {dict(vanishing)}")
        count_running = await count_leftovers(server)
        grown = server.rss_bytes() / memory - 1
        after = await ask(client)
        result.must("generation_left_behind", count_running, high=0)
        result.must("generation_rss_growth", grown, high=0.05)
        result.must("generation_cache_blocks_missing", await _count_missing_blocks(server, client), high=0)
    result.must("generation_changed", float(before != after), high=0)
    result.must("generation_tracebacks", server.tracebacks().total(), high=0)
    result.details = {"cancelled": dict(ends), "vanished": dict(vanishing), "rss_bytes": memory}
    return result


async def kill(server: ServerProcess, count: int) -> Result:
    """Kill a worker: streamed answers must fail, and whole answers must be repeated by another worker."""
    await server.wait_all_workers()
    ends: Counter[str] = Counter()
    wrong = 0
    failed: list[str] = []
    async with AsyncClient(server.grpc) as client:
        for number in range(count):
            streams = [_StreamReader() for _ in range(STREAMS)]
            tasks = [asyncio.create_task(each.listen(client)) for each in streams]
            asked = [asyncio.create_task(ask(client, max_tokens=LONG_TOKENS)) for _ in range(2)]
            await until_seen(partial(_have_begun, streams), "all have begun", IDLE_S)
            await server.replace_worker(number, signal.SIGKILL)
            ends.update(await asyncio.gather(*tasks))
            wrong += sum(each.is_wrong for each in streams)
            found = await asyncio.gather(*asked, return_exceptions=True)
            failed += [str(error) for error in found if isinstance(error, BaseException)]
    result = Result(details={"ends": dict(ends), "failed": failed})
    result.must("generation_wrong_continuations", wrong, high=0)
    result.must("generation_untyped_ends", ends.total() - ends["whole"] - ends[WorkerLost.code], high=0)
    result.must("generation_killed_streams", ends[WorkerLost.code], low=1)
    result.must("generation_whole_failed", len(failed), high=0)
    return result


def _have_begun(streams: Iterable["_StreamReader"]) -> bool:
    return all(each.tokens for each in streams)


async def ask(client: AsyncClient, prompt: str = PROMPT, max_tokens: int = MAX_TOKENS) -> str:
    """Return the whole answer of greedy decoding."""
    answer = await client.generate(MODEL, prompt, timeout_s=ANSWER_S, parameters=_make_parameters(max_tokens))
    return answer.text


async def count_leftovers(server: ServerProcess) -> int:
    """Return how many requests still run, wait or hold cache after all callers have left."""

    def count_running() -> int:
        status = server.status()
        found = status["generation"].values()
        jobs = sum(queue["waiting"] + queue["running"] for queue in status["queues"].values())
        return int(jobs + sum(each["running"] + each["waiting"] + each["cache_blocks_used"] for each in found))

    try:
        await until_seen(lambda: count_running() == 0, "nothing is generated any more", IDLE_S)
    except TimeoutError:
        return count_running()
    return 0


class _StreamReader:
    """Reads a streamed answer, and compares it with the expected text."""

    def __init__(self) -> None:
        self.tokens = 0
        self.is_wrong = False  # a piece is missing or was sent twice

    async def listen(self, client: AsyncClient) -> str:
        """Read until the end; return how the stream ended."""
        outputs = ["text_output", "usage", "counts"]
        try:
            async for answer in client.infer_stream(
                MODEL, _make_inputs(PROMPT), parameters=_make_parameters(LONG_TOKENS), outputs=outputs
            ):
                self.tokens += int(answer["counts"].sum())
                self.is_wrong |= self.tokens != int(answer["usage"][1])
        except PenstockError as error:
            return error.code
        self.is_wrong |= self.tokens != LONG_TOKENS
        return "whole"


def _make_inputs(prompt: str) -> dict[str, Any]:
    return {"text_input": np.array([prompt], object)}


def _make_parameters(max_tokens: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def _call_repeatedly(count: int, concurrency: int, call: Callable[[], Awaitable[str]]) -> Counter[str]:
    """Await `call` `count` times, `concurrency` at a time; count the outcomes."""
    numbers = iter(range(count))
    ends: Counter[str] = Counter()

    async def call_next() -> None:
        for _ in numbers:
            ends[await call()] += 1

    await asyncio.gather(*(call_next() for _ in range(concurrency)))
    return ends


async def _cancel(client: AsyncClient, rng: random.Random) -> str:
    prompt = f"{PROMPT} {rng.random()}"

    async def stream() -> None:
        async for _ in client.infer_stream(MODEL, _make_inputs(prompt), parameters=_make_parameters(MAX_TOKENS)):
            pass

    task = asyncio.create_task(stream() if rng.random() < 0.5 else _generate_whole(client, prompt))
    await asyncio.sleep(rng.uniform(0.0, MAX_STAY_S))
    task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        return "cancelled"
    return "answered" if task.exception() is None else type(task.exception()).__name__


async def _generate_whole(client: AsyncClient, prompt: str) -> None:
    await ask(client, prompt)


async def _reset_connection(port: int, rng: random.Random) -> str:
    """Reset the connection of a running request, as if the client's machine were switched off."""
    body = {"model": MODEL, "prompt": f"{PROMPT} {rng.random()}", "max_tokens": MAX_TOKENS, "temperature": 0}
    body["stream"] = rng.random() < 0.5
    sent = json.dumps(body).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    kind = f"content-type: application/json\r\ncontent-length: {len(sent)}"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{kind}\r\n\r\n"
    writer.write(head.encode() + sent)
    await writer.drain()
    await asyncio.sleep(rng.uniform(0.0, MAX_STAY_S))
    torn = writer.get_extra_info("socket")
    torn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    return "stream" if body["stream"] else "whole"


async def _count_missing_blocks(server: ServerProcess, client: AsyncClient) -> int:
    """Return 1 if there is no room for a prompt that needs nearly the whole cache, otherwise 0."""
    (standing,) = server.status()["generation"].values()
    words = (standing["cache_blocks"] // server.workers - 4) * BLOCK_TOKENS
    try:
        await ask(client, " a" * (words - BLOCK_TOKENS), BLOCK_TOKENS)
    except PenstockError:
        return 1
    (after,) = server.status()["generation"].values()
    return int(after["preemptions"] - standing["preemptions"])
