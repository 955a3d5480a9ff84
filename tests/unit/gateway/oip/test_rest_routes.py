"""The Open Inference Protocol over REST: accepted requests, answers, and errors."""

import asyncio
import gzip
import json
import zlib
from typing import Any, ClassVar

import httpx
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.config import Limits
from penstock.core.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    ModelNotReady,
    PenstockError,
    QueueFull,
    RequestTooLarge,
    UnknownModel,
)
from penstock.core.requests import InferResponse, Timing
from penstock.core.tensors import NUMPY_TYPES, Tensor, from_array, pack_bytes, to_array
from penstock.gateway.oip.rest_codec import OutputForm, decode_infer, encode_infer

INFER = "/v2/models/echo/infer"
LENGTH = "inference-header-content-length"


def tensor(data: Any = (1.5, 2.5), **changed: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": list(data), **changed}


def answer_with(served: Any, *arrays: np.ndarray, names: str = "abcdef", **parameters: Any) -> None:
    outputs = [from_array(name, array) for name, array in zip(names, arrays, strict=False)]
    served.serving.answer = lambda request: InferResponse(
        request.model, "1", request.request_id, outputs, Timing(), parameters
    )


def with_binary(message: Any, *buffers: bytes) -> dict[str, Any]:
    header = json.dumps(message).encode()
    return {"content": header + b"".join(buffers), "headers": {LENGTH: str(len(header))}}


# --- inference as JSON


async def test_tensors_are_json_in_request_and_answer(served, client):
    answer = await client.post(INFER, json={"id": "r1", "inputs": [tensor()]})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "model_name": "echo",
        "model_version": "1",
        "id": "r1",
        "outputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.5]}],
    }
    request = served.serving.last
    assert (request.model, request.version, request.protocol, request.size_bytes) == ("echo", "", "rest", 8)


async def test_a_version_in_the_path_is_used(served, client):
    await client.post("/v2/models/echo/versions/2/infer", json={"inputs": [tensor()]})
    assert served.serving.last.version == "2"


JSON_VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "INT8": [-128, 127],
    "INT16": [-32768, 32767],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "FP32": [0.5, -3],
    "FP64": [1e-300, 1.7e308],
    "BYTES": ["", "zażółć"],
}


@pytest.mark.parametrize("datatype", JSON_VALUES)
async def test_every_datatype_as_json(served, client, datatype):
    values = JSON_VALUES[datatype]
    answer = await client.post(INFER, json={"inputs": [tensor(values, datatype=datatype)]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["data"] == values
    expected = values if datatype != "BYTES" else [value.encode() for value in values]
    assert to_array(served.serving.last.inputs[0]).tolist() == [expected]


async def test_nested_data_is_decoded(served, client):
    nested = [[[1, 2], [3, 4], [5, 6]]]
    answer = await client.post(INFER, json={"inputs": [tensor(nested, shape=[1, 3, 2])]})
    assert answer.json()["outputs"][0]["data"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("shape", "data"), [([0], []), ([2, 0], [[], []]), ([], [1.0])])
async def test_empty_and_scalar_tensors(client, shape, data):
    answer = await client.post(INFER, json={"inputs": [tensor(data, shape=shape)]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["shape"] == shape


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
async def test_half_precision_is_refused_in_json(served, client, datatype):
    answer = await client.post(INFER, json={"inputs": [tensor(datatype=datatype)]})
    assert answer.status_code == 400
    assert "binary" in answer.json()["error"]
    answer_with(served, np.zeros(2, NUMPY_TYPES[datatype]))
    answer = await client.post(INFER, json={"inputs": [tensor()]})
    assert answer.status_code == 400
    assert answer.json() == {"error": f"output 'a' is {datatype}, which JSON cannot hold: request it with binary_data"}


async def test_nan_is_null_and_infinity_is_refused_in_json(served, client):
    answer_with(served, np.array([np.nan, 1], np.float32))
    answer = await client.post(INFER, json={"inputs": [tensor()]})
    assert answer.json()["outputs"][0]["data"] == [None, 1]
    answer_with(served, np.array([np.inf, 1], np.float64))
    answer = await client.post(INFER, json={"inputs": [tensor()]})
    assert answer.status_code == 400
    assert "binary_data" in answer.json()["error"]


async def test_bytes_that_are_not_utf8_are_refused_in_json(served, client):
    answer_with(served, np.array([b"\xff\xfe"], dtype=object))
    answer = await client.post(INFER, json={"inputs": [tensor()]})
    assert answer.status_code == 400
    assert "UTF-8" in answer.json()["error"]
    assert "binary_data" in answer.json()["error"]


async def test_parameters_are_passed_on_and_echoed(served, client):
    sent = {"timeout": 5000, "name": "zażółć", "rate": 0.5, "flag": True}
    answer = await client.post(INFER, json={"inputs": [tensor()], "parameters": {**sent, "binary_data_output": False}})
    assert served.serving.last.parameters == sent
    assert answer.json()["parameters"] == sent


async def test_parameters_of_the_answer_are_returned(served, client):
    answer_with(served, np.zeros(1, np.int8), tokens=12)
    answer = await client.post(INFER, json={"inputs": [tensor()], "parameters": {"mine": 1}})
    assert answer.json()["parameters"] == {"mine": 1, "tokens": 12}


async def test_only_requested_outputs_are_returned(served, client):
    await client.post(INFER, json={"inputs": [tensor()], "outputs": [{"name": "b"}, {"name": "a"}]})
    assert served.serving.last.outputs == ["b", "a"]


async def test_headers_set_id_timeout_and_trace(served, client):
    headers = {"x-request-id": "abc", "x-request-timeout-ms": "1500", "traceparent": "00-1-2-01"}
    answer = await client.post(INFER, json={"inputs": [tensor()]}, headers=headers)
    request = served.serving.last
    assert (request.request_id, request.timeout_s, request.traceparent) == ("abc", 1.5, "00-1-2-01")
    assert answer.json()["id"] == "abc"
    await client.post(INFER, json={"id": "mine", "inputs": [tensor()]}, headers=headers)
    assert served.serving.last.request_id == "mine"


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "abc", "86400001", "9" * 5000, "1_0", "٣"])
async def test_invalid_timeouts_are_refused(client, value):
    headers = {"x-request-timeout-ms": value.encode()}
    answer = await client.post(INFER, json={"inputs": [tensor()]}, headers=headers)
    assert answer.status_code == 400


# --- binary tensors


async def test_tensors_are_binary_in_request_and_answer(served, client):
    data = np.array([1.5, 2.5], np.float32).tobytes()
    item = tensor(parameters={"binary_data_size": 8})
    del item["data"]
    message = {"inputs": [item, tensor(name="y")], "parameters": {"binary_data_output": True}}
    answer = await client.post(INFER, **with_binary(message, data))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    end = int(answer.headers[LENGTH])
    header = json.loads(answer.content[:end])
    assert [output["parameters"] for output in header["outputs"]] == [{"binary_data_size": 8}] * 2
    assert answer.content[end:] == data * 2
    assert isinstance(served.serving.last.inputs[0].data, memoryview)


@pytest.mark.parametrize("datatype", [*NUMPY_TYPES, "BYTES"])
async def test_every_datatype_as_binary(client, datatype):
    data = pack_bytes([b"\xff", b""]) if datatype == "BYTES" else np.ones(2, NUMPY_TYPES[datatype]).tobytes()
    item = {"name": "x", "datatype": datatype, "shape": [2], "parameters": {"binary_data_size": len(data)}}
    message = {"inputs": [item], "parameters": {"binary_data_output": True}}
    answer = await client.post(INFER, **with_binary(message, data))
    assert answer.content[int(answer.headers[LENGTH]) :] == data


async def test_each_output_chooses_binary_or_json(served, client):
    answer_with(served, np.arange(2, dtype=np.int8), np.zeros(3, ml_dtypes.bfloat16), np.ones(1, np.int16))
    outputs = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": True}}]
    answer = await client.post(INFER, json={"inputs": [tensor()], "outputs": outputs})
    end = int(answer.headers[LENGTH])
    found = json.loads(answer.content[:end])["outputs"]
    assert [output.get("data") for output in found] == [[0, 1], None, [1]]
    assert answer.content[end:] == bytes(6)
    outputs = [{"name": "a", "parameters": {"binary_data": False}}, {"name": "b"}]
    message = {"inputs": [tensor()], "outputs": outputs, "parameters": {"binary_data_output": True}}
    answer = await client.post(INFER, json=message)
    assert answer.content[int(answer.headers[LENGTH]) :] == bytes(6) + b"\1\0"


async def test_a_header_length_without_binary_data_is_accepted(client):
    answer = await client.post(INFER, **with_binary({"inputs": [tensor()]}))
    assert answer.status_code == 200


async def test_a_raw_binary_request_is_answered(served, client):
    data = np.arange(6, dtype=np.float32).tobytes()
    answer = await client.post(INFER, content=data, headers={LENGTH: "0"})
    assert answer.status_code == 200, answer.text
    assert served.serving.last.inputs == [Tensor("x", "FP32", (3, 2), data)]
    assert answer.content[int(answer.headers[LENGTH]) :] == data
    await client.post("/v2/models/enlarger/infer", content=b"picture", headers={LENGTH: "0"})
    assert served.serving.last.inputs == [Tensor("image", "BYTES", (1, 1), pack_bytes([b"picture"]))]


@pytest.mark.parametrize(("model", "body"), [("echo", bytes(7)), ("pair", bytes(8)), ("nobody", b""), ("slow", b"")])
async def test_invalid_raw_requests_are_refused(client, model, body):
    answer = await client.post(f"/v2/models/{model}/infer", content=body, headers={LENGTH: "0"})
    assert answer.status_code in (400, 404, 503)
    assert answer.json()["error"]


# --- compression


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_requests_are_decompressed(served, client, encoding, pack):
    sent = with_binary({"inputs": [tensor()]})
    sent["headers"]["content-encoding"] = encoding
    answer = await client.post(INFER, content=pack(sent["content"]), headers=sent["headers"])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_answers_are_compressed_on_request(served, client, encoding):
    answer_with(served, np.zeros(100_000, np.float32))
    message = {"inputs": [tensor()], "parameters": {"binary_data_output": True}}
    answer = await client.post(INFER, json=message, headers={"accept-encoding": encoding})
    assert answer.headers["content-encoding"] == encoding
    assert int(answer.headers["content-length"]) < 10_000
    assert len(answer.content) == int(answer.headers[LENGTH]) + 400_000


@pytest.mark.parametrize("accept", ["identity", "br", "gzip;q=0", "*;q=0", "gzip;q=x", ""])
async def test_answers_that_must_not_be_compressed(served, client, accept):
    answer_with(served, np.zeros(100_000, np.float32))
    answer = await client.post(INFER, json={"inputs": [tensor()]}, headers={"accept-encoding": accept})
    assert "content-encoding" not in answer.headers


async def test_bombs_and_other_broken_compression(client):
    bomb = gzip.compress(bytes(50_000_000))
    assert len(bomb) < 100_000
    for body, encoding, status in [
        (bomb, "gzip", 429),
        (b"not gzip", "gzip", 400),
        (gzip.compress(b"{}")[:-3], "gzip", 400),
        (gzip.compress(b"{}") * 2, "gzip", 400),
        (b"", "deflate", 400),
        (b"{}", "br", 400),
    ]:
        answer = await client.post(INFER, content=body, headers={"content-encoding": encoding})
        assert answer.status_code == status, (encoding, answer.text)
        assert answer.json()["error"]


# --- limits and clients that leave


async def test_a_declared_length_over_the_limit_is_refused_before_reading(client):
    async def body():
        raise AssertionError("was read")
        yield b""

    answer = await client.post(INFER, content=body(), headers={"content-length": "100001"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["penstock-code"] == "request_too_large"


async def test_a_growing_body_is_refused_when_it_is_too_large(client):
    chunks = 0

    async def body():
        nonlocal chunks
        for _ in range(100):
            chunks += 1
            yield bytes(30_000)

    answer = await client.post(INFER, content=body())
    assert answer.status_code == 429
    assert chunks < 10


async def call_asgi(app: Any, messages: list[dict[str, Any]], leaves: asyncio.Event) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": INFER, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return sent


async def test_a_disconnect_cancels_the_request(served):
    served.serving.delay_s = 60
    leaves = asyncio.Event()
    body = json.dumps({"inputs": [tensor()]}).encode()
    task = asyncio.create_task(call_asgi(served.app, [{"type": "http.request", "body": body}], leaves))
    await served.serving.is_called.wait()
    leaves.set()
    assert await asyncio.wait_for(task, 5) == []
    assert served.serving.cancelled == 1
    assert not task.cancelled()


async def test_a_disconnect_within_the_body_ends_the_request(served):
    leaves = asyncio.Event()
    leaves.set()
    first = {"type": "http.request", "body": b'{"inp', "more_body": True}
    assert await call_asgi(served.app, [first], leaves) == []
    assert served.serving.requests == []


async def test_a_cancelled_server_task_stays_cancelled(served):
    served.serving.delay_s = 60
    body = json.dumps({"inputs": [tensor()]}).encode()
    task = asyncio.create_task(call_asgi(served.app, [{"type": "http.request", "body": body}], asyncio.Event()))
    await served.serving.is_called.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnknownModel("unknown"), 404),
        (QueueFull("full"), 429),
        (ModelNotReady("loading"), 503),
        (DeadlineExceeded("late"), 504),
        (EngineFailed("failed"), 500),
    ],
)
async def test_errors_have_their_status_and_code(served, client, error, status):
    served.serving.error = error
    answer = await client.post(INFER, json={"inputs": [tensor()]})
    assert (answer.status_code, answer.json()) == (status, {"error": error.message})
    assert answer.headers["penstock-code"] == error.code
    assert ("retry-after" in answer.headers) == (status in (429, 503))


async def test_a_bug_is_an_error_of_the_protocol(served, client):
    served.serving.error = ZeroDivisionError("oh")
    answer = await client.post(INFER, json={"inputs": [tensor()]})
    assert answer.status_code == 500
    assert "oh" not in answer.json()["error"]


BROKEN: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"7",
    b'"\xff"',
    b"[" * 100_000,
    b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [NaN]}]}',
    *(
        json.dumps(message).encode()
        for message in [
            {},
            {"inputs": None},
            {"inputs": {}},
            {"inputs": [7]},
            {"inputs": [{}]},
            {"inputs": [tensor()], "id": 7},
            {"inputs": [tensor()], "parameters": []},
            {"inputs": [tensor()], "parameters": {"a": None}},
            {"inputs": [tensor()], "parameters": {"a": {"b": 1}}},
            {"inputs": [tensor()], "parameters": {"a": 2**63}},
            {"inputs": [tensor()], "parameters": {"binary_data_output": 1}},
            {"inputs": [tensor()], "outputs": {}},
            {"inputs": [tensor()], "outputs": ["x"]},
            {"inputs": [tensor()], "outputs": [{}]},
            {"inputs": [tensor()], "outputs": [{"name": "x"}, {"name": "x"}]},
            {"inputs": [tensor()], "outputs": [{"name": "x", "parameters": {"classification": 3}}]},
            {"inputs": [tensor()], "outputs": [{"name": "x", "parameters": {"binary_data": "yes"}}]},
        ]
    ),
    *(
        json.dumps({"inputs": [item]}).encode()
        for item in [
            tensor(name=7),
            tensor(name=""),
            tensor(name="x" * 10_000),
            tensor(datatype="FP128"),
            tensor(datatype=["FP32"]),
            tensor(datatype={}),
            tensor(shape=None),
            tensor(shape=2),
            tensor(shape=[-1, 2]),
            tensor(shape=[True, 2]),
            tensor(shape=[1.0, 2]),
            tensor(shape=[2**64, 2]),
            tensor(shape=[2**63 - 1] * 64),
            tensor(shape=[1] * 10_000),
            tensor(shape=[3]),
            tensor(data="12"),
            tensor([[1.0], 2.0]),
            tensor([[1.0, 2.0], [3.0]]),
            tensor([[1.0], [2.0]]),
            tensor(["a", "b"]),
            tensor([None, 1]),
            tensor([True, False]),
            tensor([{}, {}]),
            tensor([1e300, 0]),
            tensor([1.5, 2], datatype="INT32"),
            tensor([2**31, 2], datatype="INT32"),
            tensor([-1, 2], datatype="UINT64"),
            tensor([10**40, 2], datatype="INT64"),
            tensor([1, 0], datatype="BOOL"),
            tensor([1, 2], datatype="BYTES"),
            tensor(parameters=[]),
            tensor(parameters={"binary_data_size": 0}),
            tensor(parameters={"shared_memory_region": "r"}),
            {"name": "x", "datatype": "FP32", "shape": [1]},
            {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
            {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": -4}},
            {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": "4"}},
        ]
    ),
]


@pytest.mark.parametrize("body", BROKEN, ids=lambda body: body[:70].decode("latin-1"))
async def test_broken_bodies_are_the_callers_fault(served, client, body):
    answer = await client.post(INFER, content=body)
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert 0 < len(answer.json()["error"]) < 2000
    assert served.serving.requests == []


@pytest.mark.parametrize(("claimed", "sent"), [(8, 7), (8, 9), (4, 4), (2**62, 8), (0, 8)])
async def test_wrong_binary_sizes_are_refused(client, claimed, sent):
    item = {"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": claimed}}
    answer = await client.post(INFER, **with_binary({"inputs": [item]}, bytes(sent)))
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("length", ["-1", "abc", "1e1", "1000000", "9" * 5000, " ", "1_0"])
async def test_wrong_header_lengths_are_refused(client, length):
    answer = await client.post(INFER, content=b'{"inputs": []}', headers={LENGTH: length})
    assert answer.status_code == 400
    assert answer.json()["error"]


JSON_TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
WORDS = st.sampled_from(["x", "FP32", "BYTES", "BF16", "binary_data_size", "shape", 1, 2, -1, [1], [2], [[1], [2]], {}])
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": WORDS | JSON_TREES,
        "datatype": st.sampled_from([*NUMPY_TYPES, "BYTES"]) | JSON_TREES,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | JSON_TREES,
        "data": st.lists(WORDS | JSON_TREES) | JSON_TREES,
        "parameters": st.dictionaries(st.just("binary_data_size"), st.integers(-1, 16)) | JSON_TREES,
    },
)
MESSAGES = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS) | JSON_TREES},
    optional={
        "id": st.text() | JSON_TREES,
        "outputs": st.lists(st.fixed_dictionaries({"name": WORDS | JSON_TREES}, optional={"parameters": JSON_TREES})),
        "parameters": JSON_TREES,
    },
)


@given(st.binary(), st.binary())
def test_arbitrary_bytes_raise_only_penstock_errors(header, binary):
    try:
        decode_infer(header, memoryview(binary))
    except PenstockError:
        pass


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(MESSAGES, st.binary(max_size=16))
def test_arbitrary_messages_raise_only_penstock_errors(message, binary):
    try:
        decode_infer(json.dumps(message).encode(), memoryview(binary))
    except PenstockError:
        pass


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    body=st.binary(),
    headers=st.dictionaries(
        st.sampled_from([LENGTH, "content-encoding", "accept-encoding", "x-request-id", "content-type", "traceparent"]),
        st.binary().filter(lambda value: not set(value) & set(b"\r\n\0")) | st.integers(0, 20).map(lambda n: b"%d" % n),
    ),
)
async def test_arbitrary_requests_are_answered(served, body, headers):
    transport = httpx.ASGITransport(app=served.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
        answer = await client.post(INFER, content=body, headers=headers)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500


# --- everything beside inference


async def test_server_metadata_and_health_are_returned(served, client):
    found = (await client.get("/v2")).json()
    assert found["name"] == "penstock"
    assert "binary_tensor_data" in found["extensions"]
    assert (await client.get("/v2/health/live")).json() == {"live": True}
    assert (await client.get("/v2/health/ready")).json() == {"ready": True}
    served.admission.is_draining = True
    answer = await client.get("/v2/health/ready")
    assert (answer.status_code, answer.json()["ready"]) == (503, False)


async def test_model_metadata_is_returned(client):
    expected = {
        "name": "echo",
        "versions": ["1", "2"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
    }
    for path in ("/v2/models/echo", "/v2/models/echo/versions/1"):
        found = (await client.get(path)).json()
        assert {key: found[key] for key in expected} == expected


async def test_model_readiness_is_returned(client):
    assert (await client.get("/v2/models/echo/ready")).json() == {"name": "echo", "ready": True}
    assert (await client.get("/v2/models/echo/versions/2/ready")).status_code == 200
    assert (await client.get("/v2/models/slow/ready")).status_code == 503
    for path in ("/v2/models/nobody/ready", "/v2/models/echo/versions/9/ready", "/v2/models/echo/versions/x/ready"):
        answer = await client.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]


async def test_model_config_is_returned(client):
    for path in ("/v2/models/echo/config", "/v2/models/echo/versions/2/config"):
        config = (await client.get(path)).json()
        assert config["max_batch_size"] == 8
        assert config["input"][0] | {"data_type": "TYPE_FP32", "dims": [2]} == config["input"][0]
        assert config["parameters"]["task"] == {"string_value": "tensor"}
        assert "dynamic_batching" in config
        assert "sequence_batching" not in config


async def test_statistics_are_returned(client):
    for path in ("/v2/models/stats", "/v2/models/echo/stats", "/v2/models/echo/versions/1/stats"):
        (found,) = (await client.get(path)).json()["model_stats"]
        assert found["inference_count"] == 7
        assert found["inference_stats"]["success"] == {"count": 7, "ns": 5_000_000_000_000}
    assert (await client.get("/v2/models/nobody/stats")).status_code == 404


async def test_the_repository_index_lists_models(client):
    every = (await client.post("/v2/repository/index")).json()
    assert {"name": "slow", "version": "1", "state": "UNAVAILABLE", "reason": "no file"} in every
    ready = (await client.post("/v2/repository/index", json={"ready": True})).json()
    assert {entry["state"] for entry in ready} == {"READY"}
    bodies: tuple[Any, ...] = ({"ready": 1}, [])
    for broken in bodies:
        assert (await client.post("/v2/repository/index", json=broken)).status_code == 400


async def test_models_are_loaded_and_unloaded(served, client):
    assert (await client.post("/v2/repository/models/echo/load")).status_code == 200
    unload = {"parameters": {"unload_dependents": False}}
    assert (await client.post("/v2/repository/models/echo/unload", json=unload)).status_code == 200
    assert served.control.calls == [("load", "echo"), ("unload", "echo")]
    assert (await client.post("/v2/repository/models/nobody/load", json={})).status_code == 404
    for broken in ({"parameters": {"config": "{}"}}, {"parameters": {"file:1/a": ""}}, {"parameters": 1}):
        answer = await client.post("/v2/repository/models/echo/load", json=broken)
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v2/", 404),
        ("GET", "/v2/models/", 404),
        ("GET", "/v3/%00%ff", 404),
        ("GET", INFER, 405),
        ("PUT", INFER, 405),
        ("POST", "/v2", 405),
        ("POST", "/v2/models//infer", 404),
        ("GET", "/v2/repository/index", 405),
        ("DELETE", "/metrics", 405),
    ],
)
async def test_unknown_routes_and_wrong_methods_are_refused(client, method, path, status):
    answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert isinstance(answer.json()["error"], str)


# --- large or many


async def test_large_json_is_decoded_and_encoded_in_threads(served, client):
    values = [n % 100 for n in range(20_000)]
    answer = await client.post(INFER, json={"inputs": [tensor(shape=[10_000, 2], data=values)]})
    assert answer.json()["outputs"][0]["data"] == values
    assert served.serving.last.size_bytes == 80_000


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"inputs": [{}] * 1025}, "1025 inputs, over the limit of 1024"),
        ({"inputs": [], "outputs": [{}] * 1025}, "1025 outputs, over the limit of 1024"),
        ({"inputs": [], "parameters": {str(n): 1 for n in range(1025)}}, "1025 parameters, over the limit of 1024"),
    ],
)
async def test_too_many_items_are_refused(served, client, message, says):
    answer = await client.post(INFER, json=message)
    assert (answer.status_code, answer.headers["penstock-code"]) == (429, "request_too_large")
    assert says in answer.json()["error"]
    assert len(served.serving.turned) == 1


def limits_with(values):
    class FewValues(Limits):
        max_values: ClassVar[int] = values

    return FewValues()


def test_elements_have_a_limit_before_they_are_parsed():
    limits = limits_with(20_000)
    inputs = [tensor(shape=[30_000, 1], data=[0] * 30_000)]
    with pytest.raises(RequestTooLarge, match="binary data"):
        decode_infer(json.dumps({"inputs": inputs}).encode(), limits=limits)


@pytest.mark.parametrize(
    "tensors", [[from_array("x", np.zeros(1025, np.int8))], [Tensor("s", "BYTES", (1025,), bytes(4100))]]
)
def test_an_answer_of_many_elements_must_be_requested_as_bytes(tensors):
    response = InferResponse("m", "1", "", tensors, Timing())
    with pytest.raises(InvalidRequest, match=r"1025 elements.*1024.*binary_data"):
        encode_infer(response, {}, OutputForm(), limits_with(1024))
    assert encode_infer(response, {}, OutputForm(is_binary=True), limits_with(1024))[1]


def test_the_length_of_parameters_and_ids_is_limited():
    for message in ({"parameters": {"a": "a" * 2**20}}, {"id": "a" * 1025}):
        with pytest.raises(PenstockError):
            decode_infer(json.dumps({"inputs": [], **message}).encode())


@pytest.mark.parametrize("body", [b" " * 70_000 + b"{}", b"x" * 70_000])
@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/repository/models/echo/load"])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_routes_that_do_not_infer_refuse_large_bodies(served, client, path, body, is_chunked):
    async def chunks():
        yield body

    answer = await client.post(path, content=chunks() if is_chunked else body)
    assert (answer.status_code, answer.headers["penstock-code"]) == (429, "request_too_large")
    assert "limits.max_control_bytes (65536)" in answer.json()["error"]
    assert not served.control.calls
