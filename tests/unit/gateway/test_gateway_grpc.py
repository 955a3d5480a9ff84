"""The errors of every gRPC method, from a server with a real socket."""

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from penstock.core.config import Limits
from penstock.core.errors import BUG_MESSAGE, InvalidRequest, InvalidTensor, PenstockError, QueueFull, UnknownModel
from penstock.endpoints.guard import create_open_guard
from penstock.endpoints.large_messages import LargeMessagePool
from penstock.gateway.gateway_grpc import SERVICE, GrpcServer
from penstock.gateway.oip.grpc_service import OipGrpc, wrap_with_guard
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.shared_memory.shared_memory_grpc import SharedMemoryGrpc
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc
from penstock.serving.serve import Serving
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.grpc_listener.grpc_server import GRPC_LOGGER
from tests.unit.conftest import Served

ELEMENTS = 100_000  # of typed contents
MANY = 1025  # inputs, outputs or parameters: one more than are taken
MESSAGE = pb.ModelInferRequest(
    model_name="echo",
    inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 2])],
    raw_input_contents=[bytes(8)],
)


class FewValues(Limits):
    max_values: ClassVar[int] = ELEMENTS


@pytest.fixture(params=["grpcio", "native"])
def behind(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Run each test with both servers."""
    return tmp_path if request.param == "native" else None


@pytest.fixture
async def channel(served: Served, tmp_path: Path, behind: Path | None) -> AsyncIterator[grpc.aio.Channel]:
    memory = SharedMemory(tmp_path)
    large = LargeMessagePool(FewValues())
    edge = OipGrpc(cast(Serving, served.serving), served.catalogue, create_open_guard(), memory, large)
    server = GrpcServer(edge, large.limits, SharedMemoryGrpc(memory), backend_folder=behind)
    port = await server.start("127.0.0.1", 0, Certificates())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def test_calls_during_shutdown_fail_with_unavailable_not_cancelled(served: Served, behind: Path | None) -> None:
    """Open streams and calls whose message has not arrived fail in the same way."""
    edge = OipGrpc(cast(Serving, served.serving), served.catalogue, create_open_guard())
    server = GrpcServer(edge, Limits(), backend_folder=behind)
    port = await server.start("127.0.0.1", 0, Certificates())
    own = (("grpc.use_local_subchannel_pool", 1),)  # each call has its own connection
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own) for _ in range(8)]
    stubs: list[Any] = [grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]

    async def call_until_nobody_is_there(stub: Any) -> set[grpc.StatusCode]:
        found: set[grpc.StatusCode] = set()
        while True:
            try:
                await stub.ModelInfer(MESSAGE)
            except grpc.aio.AioRpcError as error:
                found.add(error.code())
                if "failed to connect" in str(error.details()):
                    return found

    stream = stubs[0].ModelStreamInfer()
    await stream.write(MESSAGE)
    await stream.read()
    calling = [asyncio.create_task(call_until_nobody_is_there(stub)) for stub in stubs]
    await served.serving.is_called.wait()
    await server.stop(1.0)
    assert await asyncio.gather(*calling) == [{grpc.StatusCode.UNAVAILABLE}] * len(calling)
    assert await refusal(stream.read()) == (
        grpc.StatusCode.UNAVAILABLE,
        "this server is shutting down; call another",
        {"penstock-code": "draining", "retry-after": "1"},
    )
    for channel in channels:
        await channel.close()


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str | None, dict[str, Any]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = caught.value
    return error.code(), error.details(), dict(error.trailing_metadata())


async def test_a_request_is_answered(stub: Any) -> None:
    answer = await stub.ModelInfer(MESSAGE)
    assert answer.raw_output_contents == [bytes(8)]


@pytest.mark.parametrize(
    ("error", "status", "metadata"),
    [
        (UnknownModel("who?"), grpc.StatusCode.NOT_FOUND, {"penstock-code": "unknown_model"}),
        (QueueFull("no"), grpc.StatusCode.RESOURCE_EXHAUSTED, {"penstock-code": "queue_full", "retry-after": "1"}),
    ],
)
async def test_an_error_becomes_its_status(
    stub: Any, served: Served, error: PenstockError, status: grpc.StatusCode, metadata: dict[str, str]
) -> None:
    served.serving.error = error
    assert await refusal(stub.ModelInfer(MESSAGE)) == (status, error.message, metadata)


async def test_a_bug_is_internal_without_details(stub: Any, served: Served) -> None:
    served.serving.error = ZeroDivisionError("a secret")
    with capture_logs() as logs:
        told = await refusal(stub.ModelInfer(MESSAGE))
    assert told == (grpc.StatusCode.INTERNAL, BUG_MESSAGE, {"penstock-code": "internal"})
    assert [(entry["event"], entry["method"]) for entry in logs] == [("bug", "ModelInfer")]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("ModelReady", pb.ModelReadyRequest(name="nobody")),
        ("ModelMetadata", pb.ModelMetadataRequest(name="nobody")),
        ("ModelConfig", pb.ModelConfigRequest(name="nobody")),
        ("ModelStatistics", pb.ModelStatisticsRequest(name="nobody")),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="nobody")),
    ],
)
async def test_every_method_refuses_an_unknown_model(stub: Any, method: str, message: object) -> None:
    status, details, metadata = await refusal(getattr(stub, method)(message))
    assert (status, metadata) == (grpc.StatusCode.NOT_FOUND, {"penstock-code": "unknown_model"})
    assert details is not None
    assert "nobody" in details


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="r")),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r", key="/none", byte_size=8)),
        ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name="r")),
        ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="r")),
    ],
)
async def test_an_unknown_region_is_refused(stub: Any, method: str, message: object) -> None:
    status, _, metadata = await refusal(getattr(stub, method)(message))
    assert (status, metadata) == (grpc.StatusCode.INVALID_ARGUMENT, {"penstock-code": "invalid_request"})


async def test_a_load_with_parameters_is_refused(stub: Any) -> None:
    message = pb.RepositoryModelLoadRequest(model_name="echo")
    message.parameters["config"].string_param = "{}"
    status, details, _ = await refusal(stub.RepositoryModelLoad(message))
    assert (status, details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "load takes no parameters: change model.yaml in the repository instead",
    )


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("ModelInfer", "the message is not an inference.ModelInferRequest"),
        ("ModelReady", "the message cannot be parsed as this method's request message"),
    ],
)
async def test_an_unparsable_message_is_invalid_argument(channel: grpc.aio.Channel, method: str, says: str) -> None:
    call: Any = channel.unary_unary(f"/{SERVICE}/{method}")
    status, details, _ = await refusal(call(b"\xff\xff"))
    assert (status, details) == (grpc.StatusCode.INVALID_ARGUMENT, says)


async def test_a_stream_answers_every_message_even_invalid_ones(channel: grpc.aio.Channel, served: Served) -> None:
    stream: Any = channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer", response_deserializer=pb.ModelStreamInferResponse.FromString
    )
    unknown = pb.ModelInferRequest(model_name="echo", inputs=[pb.ModelInferRequest.InferInputTensor(name="x")])
    messages = [MESSAGE.SerializeToString(), b"\xff\xff", unknown.SerializeToString()]
    said = [answer.error_message async for answer in stream(iter(messages))]
    assert said[:2] == ["", "the message is not an inference.ModelInferRequest"]
    assert said[2]
    assert [type(error) for error in served.serving.turned] == [InvalidRequest, InvalidTensor]


def typed(count: int) -> pb.ModelInferRequest:
    """Return a message that is too large to parse on the event loop."""
    message = pb.ModelInferRequest(model_name="echo", id="7")
    message.parameters["mode"].string_param = "fast"
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, count])
    tensor.contents.fp32_contents.extend(range(count))
    return message


async def test_large_typed_contents_are_decoded_in_a_thread(stub: Any, served: Served) -> None:
    answer = await stub.ModelInfer(typed(70_000))
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == list(range(70_000))
    assert answer.parameters["mode"].string_param == "fast"
    (streamed,) = [each async for each in stub.ModelStreamInfer(iter([typed(20_000)]))]
    assert len(streamed.infer_response.raw_output_contents[0]) == 80_000
    assert served.serving.last.request_id == "7"


@pytest.mark.parametrize("count", [MANY, 60_000])
@pytest.mark.parametrize("field", ["inputs", "outputs", "raw_input_contents", "parameters"])
async def test_too_many_items_are_refused(stub: Any, served: Served, field: str, count: int) -> None:
    """The limits also apply to small messages."""
    message = pb.ModelInferRequest(model_name="echo")
    for number in range(count):
        if field == "parameters":
            message.parameters[str(number)].bool_param = True
        elif field == "raw_input_contents":
            message.raw_input_contents.append(b"")
        else:
            getattr(message, field).add()
    status, _, metadata = await refusal(stub.ModelInfer(message))
    if field != "raw_input_contents" or count > MANY:
        assert (status, metadata["penstock-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "request_too_large")
    assert len(served.serving.turned) == 1


async def test_too_many_typed_elements_are_refused(stub: Any, served: Served) -> None:
    message = pb.ModelInferRequest(model_name="echo")
    message.inputs.add(name="x", datatype="BOOL").contents.bool_contents.extend([True] * (ELEMENTS + 1))
    status, details, _ = await refusal(stub.ModelInfer(message))
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "raw_input_contents" in str(details)
    (answer,) = [each async for each in stub.ModelStreamInfer(iter([message]))]
    assert answer.error_message == details
    assert len(served.serving.turned) == 2


CONTROL = [f"/{SERVICE}/{name}" for name in ("ServerReady", "ModelReady", "RepositoryModelLoad", "RepositoryIndex")]
OTHERS = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"]


@pytest.mark.parametrize(
    "method", [*CONTROL, *OTHERS, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
)
@pytest.mark.parametrize(("data", "code"), [(b"\x78\x01" * 40_000, "request_too_large"), (b"\xff", "invalid_request")])
async def test_methods_that_do_not_infer_refuse_large_messages(
    channel: grpc.aio.Channel, method: str, data: bytes, code: str
) -> None:
    call: Any = channel.stream_stream(method)(iter([data]))
    with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [each async for each in call]
    assert dict(caught.value.trailing_metadata() or ())["penstock-code"] == code
    assert not logs


async def test_health_and_reflection_answer(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    assert (await refusal(health.Check(health_pb2.HealthCheckRequest(service="?"))))[0] is grpc.StatusCode.NOT_FOUND
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
    (answer,) = [each async for each in reflect]
    assert [service.name for service in answer.list_services_response.service] == [SERVICE]


async def test_a_bug_in_a_stream_ends_it_as_internal(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("penstock.gateway.oip.grpc_service.decode_request", broken)
    with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [answer async for answer in stub.ModelStreamInfer(iter([MESSAGE]))]
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, BUG_MESSAGE)
    assert [(entry["event"], entry["method"]) for entry in logs] == [("bug", "ModelStreamInfer")]


class KeepingContext:
    """A context that keeps the exception of `abort`, as gRPC's does."""

    async def abort(self, *told: object) -> None:
        self.told, self.raised = told, RuntimeError("aborted")
        raise self.raised


async def test_a_refused_message_is_freed_at_once() -> None:
    async def answer(message: Any, context: Any, principal: Any) -> None:
        raise InvalidRequest("no\nTraceback of a model")

    message, context = pb.ModelInferRequest(), KeepingContext()
    gc.disable()
    try:
        with pytest.raises(RuntimeError):
            await wrap_with_guard(
                "ModelInfer",
                answer,
                cast(Any, SimpleNamespace(guard=create_open_guard(), is_behind_edge=False)),
                frozenset(),
            )(message, cast(Any, context))
        assert sys.getrefcount(message) == 2
    finally:
        gc.enable()
    assert context.told[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "no")


async def test_a_disconnect_during_an_answer_is_not_logged(channel: grpc.aio.Channel) -> None:
    logger = logging.getLogger(GRPC_LOGGER)

    def is_logged(error: Exception) -> bool:
        record = logger.makeRecord(logger.name, logging.ERROR, "", 0, "", (), (type(error), error, None))
        return bool(logger.filter(record))

    assert is_logged(RuntimeError("a bug"))
    assert not is_logged(grpc.aio.InternalError("the client left"))
    assert not is_logged(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a header's value"))
