"""Behaviour of both gRPC servers: each test runs with grpcio and with the native server."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.core.config import Limits
from penstock.core.errors import ConfigError, QueueFull
from penstock.core.principals import LimitStatus
from penstock.core.requests import InferRequest, InferResponse
from penstock.endpoints.guard import create_open_guard
from penstock.gateway import gateway_grpc as server_module
from penstock.gateway.gateway_grpc import SERVICE, GrpcServer
from penstock.gateway.oip.grpc_service import OipGrpc
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc
from penstock.serving.serve import Serving
from penstock.wire.credentials.certificates import Certificates
from tests.chaos.attack.unread import DATA, HEADERS, PING, PREFACE, SETTINGS, encode_call_headers, encode_frame
from tests.unit.conftest import Served

WAIT_S = 20.0
INFER = f"/{SERVICE}/ModelInfer"
MESSAGE = pb.ModelInferRequest(
    model_name="echo",
    inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 2])],
    raw_input_contents=[bytes(8)],
)
Code = grpc.StatusCode


@dataclass
class Endpoint:
    served: Served
    server: GrpcServer
    port: int
    is_native: bool

    @asynccontextmanager
    async def channel(self, *options: tuple[str, Any]) -> AsyncIterator[grpc.aio.Channel]:
        own = ("grpc.use_local_subchannel_pool", 1)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=[own, *options]) as channel:
            yield channel

    async def infer(self, message: pb.ModelInferRequest = MESSAGE, **given: Any) -> Any:
        """Return the answer or status of one call over its own connection."""
        async with self.channel(("grpc.max_send_message_length", -1)) as channel:
            return await outcome(stub_of(channel).ModelInfer(message, **given))


def stub_of(channel: grpc.aio.Channel) -> Any:
    return grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def outcome(call: Any) -> Any:
    try:
        async with asyncio.timeout(WAIT_S):
            return await call
    except grpc.aio.AioRpcError as error:
        return error.code()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture(params=["grpcio", "native"])
def is_native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "native")


@asynccontextmanager
async def opened(served: Served, folder: Path, is_native: bool, limits: Limits) -> AsyncIterator[Endpoint]:
    edge = OipGrpc(cast(Serving, served.serving), served.catalogue, create_open_guard())
    server = GrpcServer(edge, limits, is_port_shared=False, backend_folder=folder if is_native else None)
    port = await server.start("127.0.0.1", 0, Certificates())
    try:
        yield Endpoint(served, server, port, is_native)
    finally:
        await server.stop(0)


@pytest.fixture
async def endpoint(served: Served, tmp_path: Path, is_native: bool) -> AsyncIterator[Endpoint]:
    limits = Limits(max_message_bytes=65_536, max_header_bytes=4096)
    async with opened(served, tmp_path, is_native, limits) as endpoint:
        yield endpoint


# --- deadlines and clients that leave


async def test_a_deadline_reaches_the_request(endpoint: Endpoint) -> None:
    assert (await endpoint.infer()).raw_output_contents == [bytes(8)]
    await endpoint.infer(timeout=30)
    told = [request.timeout_s for request in endpoint.served.serving.requests]
    assert told[0] is None
    assert told[1] is not None
    assert 25 < told[1] <= 31  # clients round the deadline up


async def test_a_passed_deadline_cancels_the_request(endpoint: Endpoint) -> None:
    endpoint.served.serving.delay_s = WAIT_S
    assert await endpoint.infer(timeout=0.05) is Code.DEADLINE_EXCEEDED
    await until(lambda: endpoint.served.serving.cancelled == 1)


async def test_a_cancel_or_disconnect_cancels_the_request(endpoint: Endpoint) -> None:
    serving = endpoint.served.serving
    serving.delay_s = WAIT_S
    async with endpoint.channel() as channel:
        calls = [stub_of(channel).ModelInfer(MESSAGE) for _ in range(3)]
        await until(lambda: len(serving.requests) == 3)
        calls[0].cancel()
        await until(lambda: serving.cancelled == 1)
    await until(lambda: serving.cancelled == 3)


async def test_many_calls_at_once_are_all_answered(endpoint: Endpoint) -> None:
    async with endpoint.channel() as channel:
        found = await asyncio.gather(*(outcome(stub_of(channel).ModelInfer(MESSAGE)) for _ in range(300)))
    assert {tuple(answer.raw_output_contents) for answer in found} == {(bytes(8),)}


# --- metadata and statuses


async def test_metadata_is_received_and_returned(endpoint: Endpoint) -> None:
    standing = LimitStatus("requests", 10, 1, 9, 1.0)

    def with_standing(request: InferRequest) -> InferResponse:
        request.limit_statuses = (standing,)
        return endpoint.served.serving.echo(request)

    endpoint.served.serving.is_traced = True
    endpoint.served.serving.answer = with_standing
    async with endpoint.channel() as channel:
        given = (("traceparent", "00-1-2-01"), ("some-bin", b"\xff\0"), ("twice", "1"), ("twice", "2"))
        call = stub_of(channel).ModelInfer(MESSAGE, metadata=given)
        await call
        assert dict(await call.trailing_metadata())["ratelimit-remaining"] == "9"
    assert endpoint.served.serving.last.traceparent == "00-1-2-01"
    assert endpoint.served.serving.last.client == "127.0.0.1"


async def test_too_much_metadata_is_refused_and_later_calls_are_served(endpoint: Endpoint) -> None:
    async with endpoint.channel() as channel:
        stub = stub_of(channel)
        refused = await outcome(stub.ModelInfer(MESSAGE, metadata=(("x", "a" * 8192),)))
        assert refused is Code.RESOURCE_EXHAUSTED
        assert (await outcome(stub.ModelInfer(MESSAGE))).raw_output_contents
    assert len(endpoint.served.serving.requests) == 1


async def test_an_error_has_its_status_its_text_and_its_metadata(endpoint: Endpoint) -> None:
    endpoint.served.serving.error = QueueFull("no room for größe\udcff")
    async with endpoint.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(channel).ModelInfer(MESSAGE)
    told = dict(caught.value.trailing_metadata() or ())
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    assert str(caught.value.details()).startswith("no room for größe")
    assert (told["penstock-code"], told["retry-after"]) == ("queue_full", "1")


# --- limits


async def test_messages_over_the_limit_are_refused(endpoint: Endpoint) -> None:
    """The limit applies to the decompressed size."""
    message = pb.ModelInferRequest()
    message.CopyFrom(MESSAGE)
    message.raw_input_contents[0] = bytes(2 * 1024 * 1024)
    assert await endpoint.infer(message) is Code.RESOURCE_EXHAUSTED
    assert await endpoint.infer(message, compression=grpc.Compression.Gzip) is Code.RESOURCE_EXHAUSTED
    assert not endpoint.served.serving.requests


async def test_the_number_of_connections_is_limited(served: Served, tmp_path: Path, is_native: bool) -> None:
    async with opened(served, tmp_path, is_native, Limits(max_connections=2)) as endpoint:
        async with endpoint.channel() as channel:
            assert (await outcome(stub_of(channel).ModelInfer(MESSAGE))).raw_output_contents
            others = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(4)]
            for _, writer in others:
                writer.write(PREFACE + encode_frame(SETTINGS, 0, 0))

            async def is_closed(reader: asyncio.StreamReader) -> None:
                while await reader.read(4096):
                    pass

            closing = [asyncio.create_task(is_closed(reader)) for reader, _ in others]
            await until(lambda: sum(task.done() for task in closing) >= 3)
            assert (await outcome(stub_of(channel).ModelInfer(MESSAGE))).raw_output_contents
        for _, writer in others:
            writer.transport.abort()
        await asyncio.gather(*closing, return_exceptions=True)


async def test_a_port_in_use_is_a_config_error(endpoint: Endpoint, tmp_path: Path) -> None:
    edge = OipGrpc(cast(Serving, endpoint.served.serving), endpoint.served.catalogue, create_open_guard())
    second = GrpcServer(edge, Limits(), is_port_shared=False, backend_folder=tmp_path if endpoint.is_native else None)
    with pytest.raises(ConfigError, match="--grpc-port"):
        await second.start("127.0.0.1", endpoint.port, Certificates())


async def test_gateways_share_a_port(served: Served, tmp_path: Path, is_native: bool) -> None:
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        edge = OipGrpc(cast(Serving, served.serving), served.catalogue, create_open_guard())
        behind = tmp_path if is_native else None
        servers = [GrpcServer(edge, Limits(), backend_folder=behind) for _ in range(2)]
        port = kept.getsockname()[1]
        assert [await server.start("127.0.0.1", port, Certificates()) for server in servers] == [port, port]
        await servers[0].stop(0)
        assert (await Endpoint(served, servers[1], port, is_native).infer()).raw_output_contents
        await servers[1].stop(0)


# --- HTTP/2 and gRPC features other than calls


async def test_compressed_messages_are_read(endpoint: Endpoint) -> None:
    assert (await endpoint.infer(compression=grpc.Compression.Gzip)).raw_output_contents == [bytes(8)]
    deflated = await endpoint.infer(compression=grpc.Compression.Deflate)
    if endpoint.is_native:
        assert deflated is Code.UNIMPLEMENTED  # the error names gzip
    else:
        assert deflated.raw_output_contents == [bytes(8)]


async def test_a_silent_client_is_pinged(
    served: Served, tmp_path: Path, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ping is sent while a call is open, and the call is still answered."""
    monkeypatch.setattr(server_module, "DEAD_AFTER_MS", 200)
    async with opened(served, tmp_path, is_native, Limits()) as endpoint:
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        served.serving.delay_s = WAIT_S
        body = MESSAGE.SerializeToString()
        message = b"\0" + len(body).to_bytes(4, "big") + body
        writer.write(
            PREFACE + encode_frame(SETTINGS, 0, 0) + encode_frame(HEADERS, 4, 1, encode_call_headers(INFER.encode()))
        )
        writer.write(encode_frame(DATA, 1, 1, message))
        async with asyncio.timeout(WAIT_S):
            while True:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == PING and not head[4] & 1:
                    break
        writer.transport.abort()


async def test_health_reflection_streams_and_unknown_methods(endpoint: Endpoint) -> None:
    await endpoint.server.set_ready(False)
    async with endpoint.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        checked = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert checked.status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await endpoint.server.set_ready(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        (answer,) = [each async for each in reflect]
        assert answer.file_descriptor_response.file_descriptor_proto
        answers = [each async for each in stub_of(channel).ModelStreamInfer(iter([MESSAGE] * 3))]
        assert [list(each.infer_response.raw_output_contents) for each in answers] == [[bytes(8)]] * 3
        assert endpoint.served.serving.last.client == "127.0.0.1"
        nothing: Any = channel.unary_unary(f"/{SERVICE}/Nothing")
        assert await outcome(nothing(b"")) is Code.UNIMPLEMENTED
