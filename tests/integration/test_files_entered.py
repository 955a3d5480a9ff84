"""How many of our files one request enters, from the socket to the engine and back: its way must stay readable."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest

import penstock
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.roles_bed import roles_running

MOST = 33
REQUESTS = 50
PACKAGE = Path(penstock.__file__).parent
MODELS = Path(__file__).parents[2] / "models"
TEXT = b"What a penstock does"
MESSAGE = pb.ModelInferRequest(
    model_name="minilm",
    inputs=[pb.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[1])],
    raw_input_contents=[len(TEXT).to_bytes(4, "little") + TEXT],
)


class EnteredFiles:
    """Notes the files whose functions are called or resumed, in every thread that starts while it is on."""

    def __init__(self) -> None:
        self._noted: set[str] | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        yield
        sys.setprofile(None)
        threading.setprofile(None)

    @contextmanager
    def noted(self) -> Iterator[set[str]]:
        files: set[str] = set()
        self._noted = files
        yield files
        self._noted = None

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._noted is not None and event == "call":
            self._noted.add(frame.f_code.co_filename)


def ours(files: set[str]) -> set[str]:
    """Without what is generated."""
    paths = {Path(file).relative_to(PACKAGE) for file in files if file.startswith(f"{PACKAGE}/")}
    return {str(path) for path in paths if path.parts[0] != "pb"}


@pytest.fixture
def entered() -> Iterator[EnteredFiles]:
    files = EnteredFiles()
    with files.on():
        yield files


@pytest.fixture
async def address(tmp_path: Path, entered: EnteredFiles) -> AsyncIterator[str]:
    models = tmp_path / "models"
    models.mkdir()
    (models / "minilm").symlink_to(MODELS / "minilm")
    async with roles_running(tmp_path, models) as running:
        yield running.grpc


async def test_a_request_enters_few_files(address: str, entered: EnteredFiles) -> None:
    """What every one of several requests enters: heartbeats and the like fall only into some."""
    found: set[str] | None = None
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        await stub.ModelInfer(MESSAGE)  # what is made by the first request
        for _ in range(REQUESTS):
            with entered.noted() as files:
                answer = await stub.ModelInfer(MESSAGE)
            assert len(answer.raw_output_contents[0]) == 384 * 4
            found = ours(files) if found is None else found & ours(files)
            await asyncio.sleep(0.003)
    assert found is not None
    assert {"gateway/grpc/oip.py", "serving/serve.py"} <= found
    assert not {"engines/openvino/engine.py", "engines/onnx/engine.py"}.isdisjoint(found)
    assert len(found) <= MOST, "\n".join([f"{len(found)} files:", *sorted(found)])
