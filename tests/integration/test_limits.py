"""Admission limits of a real server: a request over a limit is refused at once, with a reason and a hint."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import psutil
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from penstock.core.tensors import pack_bytes
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import ROOT, answered, floats, floats_json, write_identity, write_slow

WAIT_S = 90.0
LONG = 10_000.0  # rounds of the slow model: some seconds
MESSAGE_BYTES = 65_536
LIMITS = {
    "PENSTOCK_LIMITS__MAX_MESSAGE_BYTES": str(MESSAGE_BYTES),
    "PENSTOCK_LIMITS__MAX_ROWS": "16",
    "PENSTOCK_LIMITS__MAX_TOKENS": "64",
    "PENSTOCK_LIMITS__MAX_INFLIGHT_BYTES": "100000",
}
# One instance that takes one row: two requests go to the worker, two more may wait in the gateway.
ONE_BY_ONE = "batching: {max_rows: 1, max_queue: 2}\ninstances: {count: 1}\ntimeouts: {request_s: 600}\n"
TEXTS = ["a text of about ten tokens, and a few more"] * 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("limits")
    models = folder / "models"
    write_identity(models, "identity", "FP32")
    write_slow(models, "slow", ONE_BY_ONE)
    (models / "minilm").symlink_to(ROOT / "models/minilm")
    with ServerProcess(models, folder, environment=LIMITS) as running:
        yield running


class Edges:
    """The same request over every protocol."""

    def __init__(self, server: ServerProcess, channel: grpc.aio.Channel, http: httpx.AsyncClient) -> None:
        self.server = server
        self.stub: Any = GRPCInferenceServiceStub(channel)
        self.http = http

    async def check_refused(self, message: pb.ModelInferRequest, body: dict[str, Any], code: str, says: str) -> None:
        """Check gRPC, REST and a stream: the status, the code and the message, with a retry hint."""
        before = self.server.metric("penstock_refusals", reason=code)
        with pytest.raises(grpc.aio.AioRpcError, match=says) as caught:
            await self.stub.ModelInfer(message, timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(caught.value.trailing_metadata())
        assert trailing["penstock-code"] == code
        assert int(trailing["retry-after"]) >= 1
        answer = await self.http.post(f"/v2/models/{message.model_name}/infer", json=body)
        assert answer.status_code == 429, answer.text
        assert says.replace("\\", "") in answer.json()["error"]
        assert answer.headers["penstock-code"] == code
        assert int(answer.headers["retry-after"]) >= 1
        stream = self.stub.ModelStreamInfer(iter([message]), timeout=WAIT_S)
        heard = [each async for each in stream]
        assert says.replace("\\", "") in heard[0].error_message
        assert heard[0].infer_response.parameters["penstock-code"].string_param == code
        await until_seen(lambda: self.server.metric("penstock_refusals", reason=code) == before + 3, "all are counted")

    async def wait_until_slow_has(self, waiting: int, running: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                status = (await self.http.get("/v1/status")).json()
                (block_id,) = (block["block_id"] for block in status["blocks"] if block["model"] == "slow")
                if status["queues"][block_id] == {"waiting": waiting, "running": running}:
                    return
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def occupied(self, *messages: pb.ModelInferRequest) -> AsyncIterator[None]:
        """Keep requests running while the context lasts; at its end none of them has been answered."""
        calls = [self.stub.ModelInfer(message, timeout=WAIT_S) for message in messages]
        running = min(2, len(calls))
        try:
            await self.wait_until_slow_has(len(calls) - running, running)
            yield
            assert not any(call.done() for call in calls), "the running requests ended before the refusals were checked"
        finally:
            for call in calls:
                call.cancel()
            await self.wait_until_slow_has(0, 0)


@pytest.fixture
async def edges(server: ServerProcess) -> AsyncIterator[Edges]:
    async with (
        grpc.aio.insecure_channel(server.grpc, options=[("grpc.max_send_message_length", -1)]) as channel,
        httpx.AsyncClient(base_url=server.http_url, timeout=WAIT_S) as http,
    ):
        yield Edges(server, channel, http)


async def test_a_message_over_the_size_limit_is_refused(edges):
    numbers = [1.0] * (MESSAGE_BYTES // 4 + 1)
    await edges.check_refused(
        floats("identity", *numbers), floats_json(*numbers), "request_too_large", r"limits\.max_message_bytes"
    )
    fits = await edges.stub.ModelInfer(floats("identity", *numbers[1:]), timeout=WAIT_S)
    assert len(fits.raw_output_contents[0]) == MESSAGE_BYTES


async def test_a_message_far_over_the_limit_is_refused_unread(edges):
    """The gRPC library refuses the message before it is read whole, so its error has no retry hint."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await edges.stub.ModelInfer(floats("identity", *[1.0] * 1_000_000), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    answer = await edges.http.post("/v2/models/identity/infer", content=bytes(10_000_000))
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_compressed_message_counts_with_its_decompressed_size(edges):
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    answer = await edges.http.post(
        "/v2/models/identity/infer", content=gzip.compress(bytes(10_000_000)), headers=headers
    )
    assert answer.status_code == 429
    assert "max_message_bytes" in answer.json()["error"]


async def test_too_many_rows_are_refused(edges):
    await edges.check_refused(
        floats("identity", 1.0, rows=17), floats_json(1.0, rows=17), "request_too_large", r"limits\.max_rows"
    )
    assert answered(await edges.stub.ModelInfer(floats("identity", 1.0, rows=16), timeout=WAIT_S)) == [1.0] * 16


async def test_too_many_tokens_are_refused(edges):
    message = pb.ModelInferRequest(model_name="minilm")
    message.inputs.add(name="text", datatype="BYTES", shape=[len(TEXTS)])
    message.raw_input_contents.append(pack_bytes(TEXTS))
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}]}
    await edges.check_refused(message, body, "request_too_large", "more than 64 tokens")
    embeddings = await edges.http.post("/v1/embeddings", json={"model": "minilm", "input": TEXTS})
    assert embeddings.status_code == 429
    assert embeddings.json()["error"]["code"] == "request_too_large"
    assert int(embeddings.headers["retry-after"]) >= 1


async def test_a_full_queue_refuses_requests(edges):
    async with edges.occupied(*[floats("slow", LONG)] * 4):
        await edges.check_refused(floats("slow", 1.0), floats_json(1.0), "queue_full", "max_queue")
        # Other models are not affected.
        assert answered(await edges.stub.ModelInfer(floats("identity", 7.0), timeout=WAIT_S)) == [7.0]


async def test_the_bytes_in_flight_are_limited(edges):
    wide = [LONG] * 15_000
    async with edges.occupied(floats("slow", *wide)):
        other = [1.0] * 15_000
        await edges.check_refused(
            floats("identity", *other), floats_json(*other), "overloaded", "bytes of requests are already in flight"
        )
        assert answered(await edges.stub.ModelInfer(floats("identity", 7.0), timeout=WAIT_S)) == [7.0]
    assert len(answered(await edges.stub.ModelInfer(floats("identity", *other), timeout=WAIT_S))) == len(other)


def listening(server: ServerProcess) -> set[tuple[str, int]]:
    family = server.process_ids()
    return {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for connection in psutil.net_connections("inet")
        if connection.laddr and connection.pid in family and connection.status == psutil.CONN_LISTEN
    }


def test_the_server_listens_on_loopback_only(server):
    assert listening(server) == {("127.0.0.1", server.http_port), ("127.0.0.1", server.grpc_port)}
