"""REST under /v1: OpenAI's models and embeddings, images, and plain values for any block."""

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import PenstockError, QueueFull, RequestTooLarge
from penstock.core.requests import InferResponse, Timing
from penstock.core.tensors import Tensor, from_array, pack_bytes, to_array, unpack_bytes
from penstock.gateway.v1.multipart import parse_multipart

VECTORS = np.array([[0.25, -1.5, 3.0], [1.0, 2.0, 4.0]], np.float32)


def embed(served: Any, **parameters: Any) -> None:
    def answer(request: Any) -> InferResponse:
        vectors = VECTORS[: request.inputs[0].shape[0]]
        return InferResponse(request.model, "1", "", [from_array("embedding", vectors)], Timing(), parameters)

    served.serving.answer = answer


# --- models


async def test_models_are_listed(client):
    found = (await client.get("/v1/models")).json()
    assert found["object"] == "list"
    assert [model["id"] for model in found["data"]] == ["echo", "embedder", "enlarger", "pair", "writer"]
    echo = (await client.get("/v1/models/echo")).json()
    assert (echo["object"], echo["version"], echo["task"], echo["owned_by"]) == ("model", "2", "tensor", "penstock")


async def test_an_unknown_model_is_an_error_in_openais_format(client):
    answer = await client.get("/v1/models/nobody")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unknown_model")
    assert "nobody" in error["message"]


# --- embeddings


async def test_one_text_is_embedded(served, client):
    embed(served, tokens=5)
    answer = await client.post("/v1/embeddings", json={"model": "embedder", "input": "zażółć"})
    assert answer.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.25, -1.5, 3.0]}],
        "model": "embedder",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    request = served.serving.last
    assert unpack_bytes(request.inputs[0]) == ["zażółć".encode()]
    assert (request.protocol, request.inputs[0].shape) == ("rest", (1,))
    assert request.size_bytes == len(request.inputs[0].data)


async def test_several_texts_are_embedded_as_base64(served, client):
    embed(served)
    body = {"model": "embedder", "input": ["a", ""], "encoding_format": "base64", "dimensions": 3, "user": "me"}
    found = (await client.post("/v1/embeddings", json=body)).json()
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), np.float32) for item in found["data"]]
    np.testing.assert_array_equal(decoded, VECTORS)
    assert found["usage"]["prompt_tokens"] == 0


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"input": [1, 2]}, "token arrays"),
        ({"input": [[1, 2]]}, "token arrays"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["a", None]}, "input"),
        ({"dimensions": 2}, "supports only 3"),
        ({"dimensions": "3"}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"model": 7}, "model"),
        ({"model": ""}, "model"),
        ({"model": "echo"}, "has the task 'tensor'"),
    ],
)
async def test_invalid_embedding_requests_are_refused(served, client, changed, word):
    answer = await client.post("/v1/embeddings", json={"model": "embedder", "input": "a", **changed})
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]
    assert served.serving.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"\xff"', b"[" * 50_000])
async def test_broken_json_is_refused(client, body):
    for path in ("/v1/embeddings", "/v1/infer"):
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_refusals_have_retry_headers(served, client):
    body = {"model": "embedder", "input": "a"}
    served.serving.error = QueueFull("full")
    answer = await client.post("/v1/embeddings", json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"] == {
        "message": "full",
        "type": "rate_limit_error",
        "code": "queue_full",
        "param": None,
    }
    assert "x-should-retry" not in answer.headers
    served.serving.error = RequestTooLarge("large")
    answer = await client.post("/v1/embeddings", json=body)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
    answer = await client.post("/v1/embeddings", content=bytes(100_001))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "request_too_large")


async def test_request_ids_are_returned_or_generated(served, client):
    embed(served)
    body = {"model": "embedder", "input": "a"}
    answer = await client.post("/v1/embeddings", json=body, headers={"x-request-id": "abc"})
    assert answer.headers["x-request-id"] == served.serving.last.request_id == "abc"
    answer = await client.post("/v1/embeddings", json=body)
    assert answer.headers["x-request-id"] == served.serving.last.request_id != ""
    served.serving.error = QueueFull("full")
    answer = await client.post("/v1/embeddings", json=body, headers={"x-request-id": "abc"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (429, "abc")
    answer = await client.post("/v1/embeddings", json=body, headers={"x-request-id": b"a b"})
    assert answer.status_code == 400


async def test_headers_set_timeout_and_trace(served, client):
    embed(served)
    headers = {"x-request-timeout-ms": "250", "traceparent": "00-1-2-01"}
    await client.post("/v1/embeddings", json={"model": "embedder", "input": "a"}, headers=headers)
    assert (served.serving.last.timeout_s, served.serving.last.traceparent) == (0.25, "00-1-2-01")


async def test_a_bug_is_an_error_in_openais_format(served, client):
    served.serving.error = ZeroDivisionError("oh")
    answer = await client.post("/v1/embeddings", json={"model": "embedder", "input": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


# --- images


@pytest.mark.parametrize("headers", [{}, {"content-type": "image/jpeg"}, {"content-type": "application/octet-stream"}])
async def test_upscale_accepts_an_image_as_the_body(served, client, headers):
    answer = await client.post("/v1/images/upscale", content=b"\xffpicture", headers=headers)
    assert (answer.status_code, answer.content) == (200, b"\xffpicture")
    assert answer.headers["content-type"] == "image/png"
    assert served.serving.last.model == "enlarger"
    assert served.serving.last.inputs == [Tensor("image", "BYTES", (1, 1), pack_bytes([b"\xffpicture"]))]


async def test_upscale_accepts_a_form(served, client):
    answer = await client.post("/v1/images/upscale", files={"image": b"\xff\r\n--x"}, data={"model": "enlarger"})
    assert (answer.status_code, answer.content) == (200, b"\xff\r\n--x")


@pytest.mark.parametrize(
    ("accept", "query", "told", "media_type"),
    [
        ("*/*", {}, {}, "image/png"),
        ("application/json", {}, {}, "image/png"),
        ("image/webp", {}, {"format": "webp"}, "image/webp"),
        ("image/avif,image/webp,image/png,*/*;q=0.8", {}, {}, "image/png"),
        ("image/png;q=0.5,image/jpeg;q=0.9", {}, {"format": "jpeg"}, "image/jpeg"),
        ("image/webp", {"format": "JPG", "quality": "80"}, {"format": "JPG", "quality": "80"}, "image/jpeg"),
        ("*/*", {"mode": "denoise", "resolution": "4k"}, {"mode": "denoise", "resolution": "4k"}, "image/png"),
    ],
)
async def test_upscale_returns_the_requested_format(served, client, accept, query, told, media_type):
    answer = await client.post("/v1/images/upscale", content=b"x", params=query, headers={"accept": accept})
    assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
    assert served.serving.last.parameters == told
    form = await client.post("/v1/images/upscale", files={"image": b"x"}, data=query, headers={"accept": accept})
    assert (form.status_code, form.headers["content-type"]) == (200, media_type)
    assert served.serving.last.parameters == told


async def test_invalid_upscale_requests_are_refused(client):
    calls: list[tuple[dict[str, Any], int]] = [
        ({"files": {"picture": b"x"}}, 400),
        ({"files": [("image", b"x"), ("image", b"y")]}, 400),
        ({"content": b"x", "headers": {"content-type": "text/html"}}, 400),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400),
        ({"content": b"x", "params": {"model": "embedder"}}, 400),
        ({"content": b"x", "params": {"model": "nobody"}}, 404),
    ]
    for call, status in calls:
        answer = await client.post("/v1/images/upscale", **call)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]


# --- any block


async def test_infer_with_plain_values(served, client):
    body = {"model": "echo", "inputs": {"x": [[1, 2], [3.5, 4]]}, "parameters": {"a": 1}, "id": "r1", "version": "1"}
    answer = await client.post("/v1/infer", json=body)
    assert answer.json() == {
        "model": "echo",
        "version": "1",
        "id": "r1",
        "outputs": {"x": [[1.0, 2.0], [3.5, 4.0]]},
    }
    request = served.serving.last
    assert (request.version, request.parameters, request.size_bytes) == ("1", {"a": 1}, 16)
    assert answer.headers["x-request-id"] == "r1"


async def test_infer_fills_in_fixed_dimensions(served, client):
    await client.post("/v1/infer", json={"model": "embedder", "inputs": {"text": "hello"}})
    assert served.serving.last.inputs == [Tensor("text", "BYTES", (1,), pack_bytes(["hello"]))]
    await client.post("/v1/infer", json={"model": "enlarger", "inputs": {"image": ["a", "b"]}})
    assert served.serving.last.inputs[0].shape == (2, 1)


async def test_infer_with_half_precision(served, client):
    body = {"model": "pair", "inputs": {"a": [[2**62]], "h": [0.5, -2]}}
    answer = await client.post("/v1/infer", json=body)
    assert answer.json()["outputs"] == {"a": [[2**62]], "h": [0.5, -2.0]}
    assert to_array(served.serving.last.inputs[1]).dtype == np.float16


async def test_infer_with_bytes_that_are_not_utf8(served, client):
    raw = b"\xff\x00"
    body = {"model": "enlarger", "inputs": {"image": {"b64": base64.b64encode(raw).decode()}}}
    answer = await client.post("/v1/infer", json=body)
    assert unpack_bytes(served.serving.last.inputs[0]) == [raw]
    assert answer.json()["outputs"] == {"image": [[{"b64": "/wA="}]]}


async def test_infer_with_protocol_tensors(client):
    item = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]}
    answer = await client.post("/v1/infer", json={"model": "echo", "inputs": [item], "outputs": ["x"]})
    assert answer.json()["outputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}]


async def test_infer_with_a_form(served, client):
    files = [("image", b"\xff1"), ("image", b"\xff2")]
    answer = await client.post("/v1/infer", files=files, data={"model": "enlarger"})
    assert answer.status_code == 200, answer.text
    assert unpack_bytes(served.serving.last.inputs[0]) == [b"\xff1", b"\xff2"]
    texts = {"model": (None, "pair"), "a": (None, "[[1, 2]]"), "h": (None, "[0.5]")}
    answer = await client.post("/v1/infer", files=texts)
    assert answer.json()["outputs"] == {"a": [[1, 2]], "h": [0.5]}
    answer = await client.post("/v1/infer", files={"model": (None, "embedder"), "text": (None, "héllo")})
    assert answer.json()["outputs"] == {"text": ["héllo"]}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"inputs": {}}, 400),
        ({"model": "echo"}, 400),
        ({"model": "echo", "inputs": 7}, 400),
        ({"model": "nobody", "inputs": {}}, 404),
        ({"model": "slow", "inputs": {}}, 503),
        ({"model": "echo", "version": 1, "inputs": {}}, 400),
        ({"model": "echo", "version": "9", "inputs": {}}, 404),
        ({"model": "echo", "inputs": {"y": 1}}, 400),
        ({"model": "echo", "inputs": {"x": "a"}}, 400),
        ({"model": "echo", "inputs": {"x": [[1], [2, 3]]}}, 400),
        ({"model": "echo", "inputs": {"x": {"b64": "AA=="}}}, 400),
        ({"model": "echo", "inputs": [7]}, 400),
        ({"model": "echo", "inputs": {}, "parameters": {"a": []}}, 400),
        ({"model": "echo", "inputs": {}, "parameters": {"a": 2**63}}, 400),
        ({"model": "echo", "inputs": {}, "outputs": [7]}, 400),
        ({"model": "embedder", "inputs": {"text": {"b64": "%%"}}}, 400),
        ({"model": "embedder", "inputs": {"text": {"b64": "é"}}}, 400),
        ({"model": "embedder", "inputs": {"text": {"b65": "AA=="}}}, 400),
        ({"model": "embedder", "inputs": {"text": None}}, 400),
        ({"model": "pair", "inputs": {"h": [1e300]}}, 400),
    ],
)
async def test_invalid_infer_requests_are_refused(served, client, body, status):
    answer = await client.post("/v1/infer", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert served.serving.requests == []


async def test_invalid_forms_are_refused(client):
    for files in [
        {"x": b"1"},
        {"model": (None, b"\xff")},
        {"model": (None, "echo"), "x": (None, "{")},
        {"model": (None, "echo"), "nothing": (None, "1")},
        [("model", (None, "pair")), ("a", (None, "[[1]]")), ("a", (None, "[[1]]"))],
        {"model": (None, "echo"), "x": b"file for numbers"},
    ]:
        answer = await client.post("/v1/infer", files=files)
        assert 400 <= answer.status_code < 500, answer.text
    answer = await client.post(
        "/v1/infer", content=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b\r\n\r\nx\r\n--b--\r\n",
        b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\ncut off',
        b"--b\r\n" + b"h" * 20_000 + b": 1\r\n\r\nx\r\n--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n' * 1025 + b"--b--\r\n",
    ],
)
def test_broken_forms_are_refused(body):
    with pytest.raises(PenstockError):
        parse_multipart(b"multipart/form-data; boundary=b", body)


@given(st.binary(), st.binary())
def test_arbitrary_forms_raise_only_invalid_request(content_type, body):
    for kind in (content_type, b"multipart/form-data; boundary=b", b"multipart/form-data; boundary=" + content_type):
        for whole in (body, b"--b\r\n" + body + b"\r\n--b--\r\n"):
            try:
                parse_multipart(kind, whole)
            except PenstockError:
                pass


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["echo", "embedder", "b64"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["x", "text", "b64"]) | st.text(), inner),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    path=st.sampled_from(["/v1/infer", "/v1/embeddings"]),
    body=st.fixed_dictionaries(
        {"model": st.sampled_from(["echo", "embedder", "pair", "nobody"]) | TREES},
        optional={"inputs": TREES, "input": TREES, "outputs": TREES, "parameters": TREES, "id": TREES},
    ),
)
async def test_arbitrary_messages_are_answered(served, path, body):
    if path == "/v1/embeddings":
        embed(served)
    else:
        served.serving.answer = served.serving.echo
    transport = httpx.ASGITransport(app=served.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
        answer = await client.post(path, content=json.dumps(body).encode())
    assert answer.status_code < 500
    assert answer.status_code == 200 or answer.json()["error"]["message"]


async def test_unknown_routes_and_wrong_methods_are_refused(client):
    answer = await client.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route")
    answer = await client.get("/v1/embeddings")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "wrong_method")
    assert answer.headers["allow"] == "POST"


# --- large or many


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("embeddings", {"model": "embedder", "input": ["a"] * 4097}),
        ("embeddings", {"model": "embedder", "input": [None] * 4097}),
        ("rerank", {"query": "a", "documents": ["a"] * 4097}),
        ("infer", {"model": "echo", "inputs": {str(n): 0 for n in range(1025)}}),
        ("infer", {"model": "echo", "inputs": [{}] * 1025}),
        ("infer", {"model": "echo", "inputs": {}, "outputs": [1] * 1025}),
        ("infer", {"model": "echo", "inputs": {}, "parameters": {str(n): [] for n in range(1025)}}),
    ],
)
async def test_too_many_items_are_refused_and_counted(served, client, path, message):
    answer = await client.post(f"/v1/{path}", json=message)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "request_too_large")
    assert [type(error) for error in served.serving.turned] == [RequestTooLarge]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("embeddings", {"model": "embedder", "input": [1]}),
        ("embeddings", {"model": "nobody", "input": "a"}),
        ("rerank", {"query": "a"}),
        ("infer", {"model": "echo", "inputs": {"y": 1}}),
        ("images/upscale", {}),
    ],
)
async def test_rejected_requests_are_counted(served, client, path, message):
    answer = await client.post(f"/v1/{path}", json=message)
    assert 400 <= answer.status_code < 500
    assert len(served.serving.turned) == 1


async def test_large_messages_are_decoded_and_encoded_in_threads(served, client):
    values = [[n % 100, 1] for n in range(10_000)]
    answer = await client.post("/v1/infer", json={"model": "echo", "inputs": {"x": values}})
    assert answer.json()["outputs"]["x"] == values
    form = {"model": (None, "echo"), "x": (None, json.dumps(values[:8000]))}
    answer = await client.post("/v1/infer", files=form)
    assert answer.json()["outputs"]["x"] == values[:8000]
    embed(served)
    answer = await client.post("/v1/embeddings", json={"model": "embedder", "input": "a" * 90_000})
    assert answer.status_code == 200
    assert len(served.serving.last.inputs[0].data) == 90_004


@given(st.lists(st.tuples(st.binary(), st.booleans()), min_size=1, max_size=4), st.binary(max_size=8))
def test_generated_forms_are_parsed_to_their_parts(parts, preamble):
    boundary = b"a boundary that no part has"
    kinds = {True: b'; filename="f"', False: b""}
    body = b"".join(
        b'--%s \r\nX-More: 1\r\nContent-Disposition: form-data; name="n"%s\r\n\r\n%s\r\n'
        % (boundary, kinds[is_file], data)
        for data, is_file in parts
    )
    whole = (preamble + b"\r\n" if preamble else b"") + body + b"--" + boundary + b"--\r\n"
    found = parse_multipart(b'multipart/form-data; boundary="%s"' % boundary, whole)
    assert [(part.name, part.is_file, part.data) for part in found] == [("n", is_file, data) for data, is_file in parts]
