"""Honest callers of a no-op model over gRPC and REST, in a separate process during an attack."""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import grpc
import httpx
import numpy as np

from benchmarks.server import ServerProcess
from penstock.models.samples.noop import NOOP
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.calls import make_infer_request

PAUSE_S = 0.05
DEADLINE_S = 30.0
NUMBERS = 256


class HonestCallers:
    """A context manager that sends requests; on exit, `failed` and `worst_s` describe the answers."""

    def __init__(self, server: ServerProcess, key_file: Path | None = None) -> None:
        self._command = [sys.executable, "-m", __spec__.name, server.grpc, server.http_url, str(key_file or "")]
        self._found: dict[str, Any] = {}

    @property
    def failed(self) -> int:
        return len(self._found["problems"])

    @property
    def worst_s(self) -> float:
        return float(self._found["worst_s"])

    def details(self) -> dict[str, Any]:
        return {**self._found, "problems": self._found["problems"][:5]}

    async def __aenter__(self) -> "HonestCallers":
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=PIPE)
        assert self._process.stdout is not None
        await self._process.stdout.readline()  # the process has sent its first request
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.terminate()
        async with asyncio.timeout(2 * DEADLINE_S):
            written = await self._process.communicate()
        self._found = json.loads(written[0])


class _Callers:
    def __init__(self, grpc_target: str, http_url: str, key: str) -> None:
        headers = {"x-api-key": key} if key else {}
        self._client = httpx.AsyncClient(base_url=http_url, headers=headers, timeout=DEADLINE_S)
        self._channel = grpc.aio.insecure_channel(grpc_target)
        self._metadata = tuple(headers.items())
        self._asked = 0
        self._worst_s = 0.0
        self._problems: list[str] = []

    async def run(self) -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        await self.ask_grpc()
        print("asked", flush=True)
        tasks = [asyncio.create_task(self._ask_forever(ask, over)) for ask in (self.ask_grpc, self.ask_rest)]
        await asyncio.gather(*tasks)
        print(json.dumps({"asked": self._asked, "worst_s": round(self._worst_s, 3), "problems": self._problems}))

    async def _ask_forever(self, ask: Any, over: asyncio.Event) -> None:
        while not over.is_set():
            began = time.monotonic()
            problem = await ask()
            self._asked += 1
            self._worst_s = max(self._worst_s, time.monotonic() - began)
            if problem:
                self._problems.append(problem)
            await asyncio.sleep(PAUSE_S)

    async def ask_grpc(self) -> str:
        message = make_infer_request(NOOP, ("x", "FP32", (1, NUMBERS), np.zeros(NUMBERS, np.float32).tobytes()))
        try:
            call: Any = GRPCInferenceServiceStub(self._channel).ModelInfer
            await call(message, metadata=self._metadata, timeout=DEADLINE_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return ""

    async def ask_rest(self) -> str:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, NUMBERS], "data": [0.0] * NUMBERS}
        try:
            answer = await self._client.post(f"/v2/models/{NOOP}/infer", json={"inputs": [tensor]})
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return "" if answer.status_code == 200 else f"{answer.status_code}: {answer.text[:200]}"


async def _main(grpc_target: str, http_url: str, key: str) -> None:
    await _Callers(grpc_target, http_url, key).run()


if __name__ == "__main__":
    target, url, file = sys.argv[1:]
    asyncio.run(_main(target, url, Path(file).read_text() if file else ""))
