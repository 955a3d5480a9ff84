"""Limits that Penstock adds to the native server, over real connections: partial messages, answers, waiting calls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from benchmarks.waiting import until
from penstock.core.config import Limits
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.core.tensors import Tensor
from penstock.endpoints.guard import create_open_guard
from penstock.gateway.gateway_grpc import GrpcServer
from penstock.gateway.native_grpc import native_server
from penstock.gateway.oip.grpc_service import OipGrpc
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.serving.admission import Admission
from penstock.serving.serve import Serving
from penstock.wire.credentials.certificates import Certificates
from tests.chaos.attack.unread import DATA, HEADERS, PREFACE, SETTINGS, WINDOW, encode_call_headers, encode_frame
from tests.unit.conftest import Served

WAIT_S = 20.0
MIB = 1024 * 1024
WINDOW_OPENED = encode_frame(WINDOW, 0, 0, (2**31 - 65536).to_bytes(4, "big"))  # as large as can be
CALL_HEADERS = encode_frame(HEADERS, 4, 1, encode_call_headers(native_server.METHOD.encode()))
MESSAGE = pb.ModelInferRequest(
    model_name="echo",
    inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 2])],
    raw_input_contents=[bytes(8)],
)


@dataclass
class Opened:
    port: int
    admission: Admission
    server: GrpcServer

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        yield reader, writer
        writer.transport.abort()

    @asynccontextmanager
    async def caller(self) -> AsyncIterator[Any]:
        unlimited = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=unlimited) as channel:
            yield GRPCInferenceServiceStub(channel).ModelInfer


@asynccontextmanager
async def opened(served: Served, folder: Path, limits: Limits) -> AsyncIterator[Opened]:
    edge = OipGrpc(cast(Serving, served.serving), served.catalogue, create_open_guard())
    server = GrpcServer(edge, limits, is_port_shared=False, backend_folder=folder)
    port = await server.start("127.0.0.1", 0, Certificates())
    try:
        yield Opened(port, edge.admission, server)
    finally:
        await server.stop(0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """Count connections often."""
    monkeypatch.setattr(native_server, "COUNT_S", 0.05)
    monkeypatch.setattr(native_server, "CHECK_S", 0.02)


def within(served: Served, limits: Limits) -> Limits:
    cast(Any, served.serving).admission = Admission(limits)
    return limits


async def is_ended(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(WAIT_S):
        try:
            while await reader.read(65536):
                pass
        except ConnectionError:
            pass
    return True


async def test_connections_with_large_partial_messages_are_cut(served: Served, tmp_path: Path) -> None:
    limits = within(served, Limits(max_message_bytes=MIB, max_inflight_bytes=2 * MIB))
    async with (
        opened(served, tmp_path, limits) as endpoint,
        endpoint.caller() as call,
        endpoint.connection() as (reader, writer),
    ):
        await call(MESSAGE)
        writer.write(PREFACE + encode_frame(SETTINGS, 0, 0) + encode_frame(SETTINGS, 1, 0))
        async with asyncio.timeout(WAIT_S):
            await reader.readuntil(WINDOW_OPENED)
        writer.write(CALL_HEADERS)
        writer.write(encode_frame(DATA, 0, 1, b"\0" + (2**31).to_bytes(4, "big")))
        for _ in range(3 * MIB // 16384):
            writer.write(encode_frame(DATA, 0, 1, bytes(16384)))
        with capture_logs() as logs:
            assert await is_ended(reader)
        assert [entry["event"] for entry in logs] == ["grpc_connections_cut"]
        assert (await call(MESSAGE)).raw_output_contents == [bytes(8)]


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_connection_that_stops_within_a_message_is_cut(served: Served, tmp_path: Path, is_begun: bool) -> None:
    limits = within(served, Limits(message_timeout_s=0.2, header_timeout_s=0.2))
    async with opened(served, tmp_path, limits) as endpoint, endpoint.connection() as (reader, writer):
        if is_begun:
            writer.write(
                PREFACE + encode_frame(SETTINGS, 0, 0) + CALL_HEADERS + encode_frame(DATA, 0, 1, b"\0\0\0\0\x09half")
            )
        with capture_logs() as logs:
            assert await is_ended(reader)
        assert [entry["event"] for entry in logs] == ["grpc_connections_cut"]


async def test_a_large_answer_counts_until_it_is_read(served: Served, tmp_path: Path) -> None:
    limits = within(served, Limits())
    size = 8 * MIB

    def large(request: InferRequest) -> InferResponse:
        return InferResponse("echo", "1", "", [Tensor("x", "FP32", (1, size // 4), bytes(size))], Timing())

    served.serving.answer = large
    async with opened(served, tmp_path, limits) as endpoint:
        unsent = endpoint.admission.unsent
        async with endpoint.caller() as call:
            assert len((await call(MESSAGE)).raw_output_contents[0]) == size
            async with asyncio.timeout(WAIT_S):
                while unsent.bytes:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        async with endpoint.connection() as (_, writer):
            body = MESSAGE.SerializeToString()
            writer.write(PREFACE + encode_frame(SETTINGS, 0, 0) + CALL_HEADERS)
            writer.write(encode_frame(DATA, 1, 1, b"\0" + len(body).to_bytes(4, "big") + body))
            async with asyncio.timeout(WAIT_S):
                while not unsent.bytes:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert unsent.bytes >= size  # its window is shut
        async with asyncio.timeout(WAIT_S):
            while unsent.bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_calls_are_attributed_to_their_clients(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a new pygrpc-native numbers its connections differently: other connections come between these calls."""
    monkeypatch.setattr(native_server, "COUNT_S", 1000.0)
    limits = within(served, Limits())
    async with opened(served, tmp_path, limits) as endpoint, endpoint.connection(), endpoint.caller() as call:
        await call(MESSAGE)
        async with endpoint.connection() as (_, writer):
            body = MESSAGE.SerializeToString()
            writer.write(PREFACE + encode_frame(SETTINGS, 0, 0) + CALL_HEADERS)
            writer.write(encode_frame(DATA, 1, 1, b"\0" + len(body).to_bytes(4, "big") + body))
            server = endpoint.server._native
            assert server is not None
            mine = f"ipv4:127.0.0.1:{writer.get_extra_info('sockname')[1]}"
            await until(lambda: mine in server._whole_bytes)
            assert len(server._whole_bytes) == 2
            assert server._whole_bytes.keys() < set(server._relay.peers.values())


async def test_calls_are_refused_if_too_many_wait_for_the_event_loop(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = within(served, Limits())
    async with opened(served, tmp_path, limits) as endpoint, endpoint.caller() as call:
        server = endpoint.server._native
        assert server is not None
        monkeypatch.setattr(server, "_most_waiting", 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(MESSAGE)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(caught.value.trailing_metadata() or ())["penstock-code"] == "overloaded"
        monkeypatch.undo()
        assert (await call(MESSAGE)).raw_output_contents == [bytes(8)]


def test_without_metrics_one_undelivered_call_is_assumed() -> None:
    assert native_server.count_undelivered_calls(None, 0) == 1
    methods = {"ModelInfer": {"started": 5, "status": {"ok": {"count": 2}}}}
    assert native_server.count_undelivered_calls({"methods": methods}, 1) == 2
