"""Honest callers in a separate process: each sends a request, waits for its answer, and records the time."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import grpc
import httpx
import uvloop

from benchmarks.waiting import until_seen
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.calls import make_text_request
from tests.chaos.checked_load import EchoQuestion
from tests.chaos.repository import ECHO

PAUSE_S = 0.05
DEADLINE_S = 45.0  # longer than the server takes to replace a process whose event loop hangs
TEXT = "the gate that meters water onto turbines"
Ask = Callable[[int], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class HonestRequest:
    caller: str
    sent: float  # monotonic time, which all processes share
    took_s: float
    problem: str


class Neighbours:
    """A context manager that runs honest callers in another process, beside an attack."""

    def __init__(self, grpc_target: str, http_target: str, file: Path) -> None:
        self._file = file
        file.touch()
        command = [sys.executable, "-m", __spec__.name, grpc_target, http_target, str(file)]
        self._process = Popen(command)

    def __enter__(self) -> "Neighbours":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)

    async def wait_requests_since(self, moment: float) -> list[HonestRequest]:
        """Wait until each caller got an answer to a later request; return the requests since `moment`."""
        await until_seen(lambda: len(self._list_callers_since(moment)) == len(CALLERS), "all neighbours ask on", 90)
        return [asked for asked in self._read() if asked.sent + asked.took_s >= moment]

    def _list_callers_since(self, moment: float) -> set[str]:
        return {asked.caller for asked in self._read() if asked.sent >= moment}

    def _read(self) -> list[HonestRequest]:
        lines = self._file.read_text().splitlines(keepends=True)
        return [HonestRequest(**json.loads(line)) for line in lines if line.endswith("\n")]


async def _ask_grpc(question: Callable[[int], pb.ModelInferRequest], call: Any, number: int) -> str:
    try:
        answer = await call(question(number), timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "" if answer.raw_output_contents else "an answer without an output"


def _make_text(number: int) -> pb.ModelInferRequest:
    return make_text_request("minilm", f"{number} {TEXT}")


async def _ask_rest(client: httpx.AsyncClient, number: int) -> str:
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [f"{number} {TEXT}"]}]}
    return await _find_problem(client.post("/v2/models/minilm/infer", json=body))


async def _find_problem(asking: Awaitable[httpx.Response]) -> str:
    """Return the problem of an answer; empty if there is none."""
    try:
        answer = await asking
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return "" if answer.status_code == 200 else f"{answer.url.path} {answer.status_code}: {answer.text[:200]}"


CALLERS = (f"grpc {ECHO}", "grpc minilm", "rest minilm", "rest ready")


async def _run(grpc_target: str, http_target: str, file: Path) -> None:
    with file.open("a", buffering=1) as lines:
        async with (
            grpc.aio.insecure_channel(grpc_target) as channel,
            httpx.AsyncClient(base_url=f"http://{http_target}", timeout=DEADLINE_S) as client,
        ):
            call = GRPCInferenceServiceStub(channel).ModelInfer
            asks: list[Ask] = [
                lambda number: _ask_grpc(EchoQuestion().ask, call, number),
                lambda number: _ask_grpc(_make_text, call, number),
                lambda number: _ask_rest(client, number),
                lambda number: _find_problem(client.get("/v2/health/ready")),
            ]
            async with asyncio.TaskGroup() as group:
                for name, ask in zip(CALLERS, asks, strict=True):
                    group.create_task(_ask_forever(name, ask, lines.write))


async def _ask_forever(name: str, ask: Ask, write: Callable[[str], object]) -> None:
    number = 0
    while True:
        number += 1
        sent = time.monotonic()
        problem = await ask(number)
        asked = {"caller": name, "sent": sent, "took_s": time.monotonic() - sent, "problem": problem}
        write(json.dumps(asked) + "\n")
        await asyncio.sleep(PAUSE_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("grpc")
    parser.add_argument("http")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    uvloop.run(_run(options.grpc, options.http, options.file))
