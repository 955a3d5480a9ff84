"""How many of our files one request enters, from the socket to the engine and back: its way must stay readable."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

import penstock
from penstock.app.gateway import Gateway
from penstock.app.ports import open_http_socket
from penstock.core.blocks import BlockState, GatewayMember
from penstock.core.config import Config, Telemetry
from penstock.manager.manager import Manager
from penstock.manager.server import serve_manager
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.wire.control import RemoteControl
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.endpoints import Endpoint
from penstock.wire.leader import Leader, SoleManager
from penstock.worker.loop import Worker

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
    """Of a server all of whose roles are in this process."""
    config = Config(models=tmp_path / "models", data_dir=tmp_path / "data")
    config.models.mkdir()
    (config.models / "minilm").symlink_to(MODELS / "minilm")
    traces = Traces(Telemetry(), "test")
    async with AsyncExitStack() as stack:
        store = await SqliteMetadataStore.open(config.data_dir / "metadata.db")
        stack.push_async_callback(store.close)
        manager = Manager(store, config.models, is_fresh=True)
        stack.push_async_callback(manager.close)
        await manager.start()
        control = f"unix:{tmp_path / 'manager.sock'}"
        server = await serve_manager(manager, control)
        stack.push_async_callback(server.stop, None)
        gateway = Gateway("gateway-0", config, tmp_path / "metrics", traces)
        stack.push_async_callback(gateway.close)
        endpoint = gateway.listen(Endpoint(f"ipc://{tmp_path / 'gateway.ipc'}"))
        leader = Leader(SoleManager(control))
        stack.push_async_callback(leader.close)
        remote = RemoteControl(leader, GatewayMember("gateway-0", endpoint), gateway.cluster_changed)
        stack.push_async_callback(remote.close)
        port = await gateway.open(remote, 0, open_http_socket(config.host, 0), Certificates())
        stop = asyncio.Event()
        worker = Worker("worker-0", leader, config, WorkerMetrics(CollectorRegistry()), traces)
        running = asyncio.create_task(worker.run(stop))
        await manager.wait_until(lambda: all(view.state is BlockState.READY for view in manager.view()))
        await gateway.catch_up()
        yield f"{config.host}:{port}"
        stop.set()
        await running


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
    assert {"gateway/grpc/oip.py", "serving/serve.py", "engines/openvino/engine.py"} <= found
    assert len(found) <= MOST, "\n".join([f"{len(found)} files:", *sorted(found)])
