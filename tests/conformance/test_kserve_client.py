"""The kserve package's unmodified inference clients, REST and gRPC."""

from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput

A = np.array([[1, 2, 3, 4]], np.int32)
B = np.array([[10, 20, 30, 40]], np.int32)


@pytest.fixture
async def rest(server) -> AsyncIterator[InferenceRESTClient]:
    async with InferenceRESTClient(RESTConfig(protocol="v2", retries=0)) as opened:
        yield opened


@pytest.fixture
async def grpc_client(server) -> AsyncIterator[InferenceGRPCClient]:
    async with InferenceGRPCClient(server.grpc) as opened:
        yield opened


def add_sub(binary: bool, **further) -> InferRequest:
    inputs = [InferInput(name, list(array.shape), "INT32") for name, array in (("a", A), ("b", B))]
    for made, array in zip(inputs, (A, B), strict=True):
        made.set_data_from_numpy(array, binary_data=binary)
    return InferRequest("add_sub", inputs, request_id="r1", **further)


async def test_rest_health_is_reported(server, rest):
    assert await rest.is_server_live(server.http_url)
    assert await rest.is_server_ready(server.http_url)
    assert await rest.is_model_ready(server.http_url, "add_sub")
    assert not await rest.is_model_ready(server.http_url, "nobody")


@pytest.mark.parametrize("sends_binary", [False, True])
@pytest.mark.parametrize("gets_binary", [False, True])
async def test_rest_inference_returns_outputs(server, rest, sends_binary, gets_binary):
    request = add_sub(sends_binary, parameters={"binary_data_output": gets_binary})
    answer = await rest.infer(server.http_url, request, model_name="add_sub")
    found = {output.name: output.as_numpy() for output in answer.outputs}
    np.testing.assert_array_equal(found["sum"], A + B)
    np.testing.assert_array_equal(found["difference"], A - B)
    assert (answer.id, answer.model_name) == ("r1", "add_sub")


async def test_rest_outputs_can_be_selected(server, rest):
    answer = await rest.infer(
        server.http_url, add_sub(True, request_outputs=[RequestedOutput("sum")]), model_name="add_sub"
    )
    assert [output.name for output in answer.outputs] == ["sum"]


async def test_rest_halves_and_bytes_are_accepted(server, rest):
    half = np.array([[0.5, -2]], np.float16)
    text = np.array([[b"a", b"zaz"]], dtype=object)
    for name, datatype, array in (("identity_fp16", "FP16", half), ("identity_bytes", "BYTES", text)):
        made = InferInput("x", list(array.shape), datatype)
        made.set_data_from_numpy(array, binary_data=True)
        request = InferRequest(name, [made], parameters={"binary_data_output": True})
        answer = await rest.infer(server.http_url, request, model_name=name)
        found = answer.outputs[0].as_numpy().tolist()
        assert [[v.encode() if isinstance(v, str) else v for v in row] for row in found] == array.tolist()


async def test_rest_dictionaries_and_errors_are_supported(server, rest):
    item = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.5]}
    answer = await rest.infer(server.http_url, {"inputs": [item]}, model_name="identity_fp32")
    assert answer.outputs[0].data == [1.5, 2.5]
    with pytest.raises(httpx.HTTPStatusError, match="unknown model"):
        await rest.infer(server.http_url, {"inputs": [item]}, model_name="nobody")


async def test_rest_embeds_texts(server, rest, minilm):
    made = InferInput("text", [1], "BYTES", data=["a photograph of a fig"])
    answer = await rest.infer(server.http_url, InferRequest(minilm, [made]), model_name=minilm)
    assert answer.outputs[0].as_numpy().shape == (1, 384)


async def test_grpc_health_is_reported(grpc_client):
    assert await grpc_client.is_server_live()
    assert await grpc_client.is_server_ready()
    assert await grpc_client.is_model_ready("add_sub")


@pytest.mark.parametrize("sends_binary", [False, True])
async def test_grpc_inference_returns_outputs(grpc_client, sends_binary):
    answer = await grpc_client.infer(add_sub(sends_binary))
    found = {output.name: output.as_numpy() for output in answer.outputs}
    np.testing.assert_array_equal(found["sum"], A + B)
    np.testing.assert_array_equal(found["difference"], A - B)
