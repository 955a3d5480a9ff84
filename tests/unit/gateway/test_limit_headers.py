"""The headers with a caller's limits, in answers and refusals of every protocol."""

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import httpx
import pytest

from penstock.core.config import AccessSettings, KeyLimitSettings, Limits
from penstock.core.errors import RateLimited
from penstock.core.principals import LimitStatus
from penstock.core.requests import InferRequest, InferResponse
from penstock.endpoints import statuses
from penstock.features.limits.meter import Meter
from penstock.gateway.gateway_grpc import GrpcServer
from penstock.gateway.oip.grpc_service import OipGrpc
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.serving.serve import Serving
from penstock.storage.limits.memory_limits import MemoryLimitStore
from penstock.telemetry.metrics import LimitMetrics
from penstock.wire.credentials.certificates import Certificates
from tests.unit.conftest import Served

STANDINGS = (
    LimitStatus("requests", 20, 2, 15, 0.5),
    LimitStatus("tokens", 1000, 2, 100, 1.8),
    LimitStatus("concurrency", 50, 0, 1, 0.0),
)
TOLD = {
    "ratelimit-policy": '"requests";q=20;w=2, "tokens";q=1000;w=2, "concurrency";q=50;qu="concurrent-requests"',
    "ratelimit": '"requests";r=15;t=1, "tokens";r=100;t=2, "concurrency";r=1;t=0',
    "ratelimit-limit": "1000",
    "ratelimit-remaining": "100",
    "ratelimit-reset": "2",
    "x-ratelimit-limit": "1000",
    "x-ratelimit-remaining": "100",
    "x-ratelimit-reset": "2",
}
OF_REQUESTS = {
    "ratelimit-limit": "20",
    "x-ratelimit-remaining": "15",
    "retry-after": "1",
    "retry-after-ms": "250",
    "penstock-code": "rate_limited",
    "penstock-limit": "requests",
}
OPENAI = {
    "x-ratelimit-limit-requests": "20",
    "x-ratelimit-remaining-requests": "15",
    "x-ratelimit-reset-requests": "0.500s",
    "x-ratelimit-limit-tokens": "1000",
    "x-ratelimit-remaining-tokens": "100",
    "x-ratelimit-reset-tokens": "1.800s",
}
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
V1: tuple[str, Any] = ("/v1/infer", {"model": "echo", "inputs": {"x": [[1, 2]]}})
V2: tuple[str, Any] = ("/v2/models/echo/infer", {"inputs": [TENSOR]})


@pytest.fixture
def answering(served: Served) -> Served:
    """Answer as if the caller had limits and stayed within them."""
    echo = served.serving.answer

    def answer(request: InferRequest) -> InferResponse:
        request.limit_statuses = STANDINGS
        return echo(request)

    served.serving.answer = answer
    return served


@pytest.fixture
def refusing(served: Served) -> Served:
    error = RateLimited("wait", limit="requests", retry_after_s="0.25")
    error.limit_statuses = STANDINGS
    served.serving.error = error
    return served


@pytest.mark.parametrize("call", [V1, V2])
async def test_rest_answers_have_limit_headers(
    answering: Served, client: httpx.AsyncClient, call: tuple[str, Any]
) -> None:
    answer = await client.post(call[0], json=call[1])
    assert answer.status_code == 200
    expected = TOLD | OPENAI if call is V1 else TOLD
    assert {name: value for name, value in answer.headers.items() if "ratelimit" in name} == expected


@pytest.mark.parametrize("call", [V1, V2])
async def test_rest_refusals_have_limit_headers(
    refusing: Served, client: httpx.AsyncClient, call: tuple[str, Any]
) -> None:
    answer = await client.post(call[0], json=call[1])
    assert answer.status_code == 429
    expected = {**TOLD, **OF_REQUESTS, "x-ratelimit-limit": "20", "ratelimit-remaining": "15"}
    expected |= {"ratelimit-reset": "1", "x-ratelimit-reset": "1"} | (OPENAI if call is V1 else {})
    told = {name: value for name, value in answer.headers.items() if not name.startswith(("content-", "x-request"))}
    assert told == expected


async def test_callers_without_limits_get_no_headers(served: Served, client: httpx.AsyncClient) -> None:
    for path, body in (V1, V2):
        answer = await client.post(path, json=body)
        assert not [name for name in answer.headers if "ratelimit" in name]


@pytest.mark.parametrize("path", [V1[0], V2[0]])
async def test_a_limit_refuses_before_the_body_is_read(served: Served, client: httpx.AsyncClient, path: str) -> None:
    settings = AccessSettings(anonymous_limits=KeyLimitSettings(requests_per_s=0.1))
    meter = served.serving.meter = Meter(MemoryLimitStore(), settings, LimitMetrics(served.registry))
    await meter.take(InferRequest("echo", [], client="127.0.0.1"), served.resolver.resolve("echo", ""))

    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("was read")
        yield b""

    answer = await client.post(path, content=body())
    assert (answer.status_code, answer.headers["penstock-limit"]) == (429, "requests")
    assert [error.code for error in served.serving.turned] == ["rate_limited"]


@pytest.fixture
async def stub(served: Served) -> AsyncIterator[Any]:
    server = GrpcServer(OipGrpc(cast(Serving, served.serving), served.catalogue, served.guard), Limits())
    port = await server.start("127.0.0.1", 0, Certificates())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield GRPCInferenceServiceStub(channel)
    await server.stop(0)


def message() -> pb.ModelInferRequest:
    asked = pb.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(8)])
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    return asked


async def test_grpc_answers_have_limits_in_trailing_metadata(answering: Served, stub: Any) -> None:
    call = stub.ModelInfer(message())
    await call
    assert dict(await call.trailing_metadata()) == TOLD


async def test_grpc_refusals_have_limits_in_trailing_metadata(refusing: Served, stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(message())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(caught.value.trailing_metadata() or ())
    assert trailing.items() >= OF_REQUESTS.items()
    assert trailing["ratelimit"] == TOLD["ratelimit"]


async def test_a_refused_message_does_not_end_the_stream(refusing: Served, stub: Any) -> None:
    answers = [each async for each in stub.ModelStreamInfer(iter([message(), message()]))]
    assert len(answers) == 2
    for each in answers:
        parameters = each.infer_response.parameters
        assert parameters["penstock-code"].string_param == "rate_limited"
        assert parameters["limit"].string_param == "requests"
        assert parameters["retry_after_s"].double_param == 0.25


def test_older_headers_show_concurrency_only_if_it_refused() -> None:
    assert statuses.make_limit_headers(STANDINGS, "concurrency")["x-ratelimit-limit"] == "50"
    assert statuses.make_limit_headers(STANDINGS[2:])["x-ratelimit-limit"] == "50"


def test_without_limits_there_are_no_headers() -> None:
    assert statuses.make_limit_headers(()) == {}
    assert statuses.make_headers(RateLimited("wait")) == {
        "penstock-code": "rate_limited",
        "penstock-limit": "",
        "retry-after": "1",
        "retry-after-ms": "1000",
    }
