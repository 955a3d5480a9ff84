"""Reranking over REST: the requests to scoring and embedding models, and the order of the results."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.blocks import BlockDescription, BlockState, BlockView
from penstock.core.errors import QueueFull
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import Tensor, TensorSpec, from_array, pack_bytes, unpack_bytes
from penstock.gateway.v1 import v1_schemas
from tests.unit.conftest import BLOCKS

BODY = {"model": "embedder", "query": "q", "documents": ["a", "b", "c"]}
TEXT = (-1, 1)


def scorer(name: str) -> BlockDescription:
    inputs = (TensorSpec("query", "BYTES", TEXT), TensorSpec("passage", "BYTES", TEXT))
    outputs = (TensorSpec("score", "FP32", TEXT),)
    task = BlockSettings(task="score")
    return BlockDescription(f"blk-{name}-1", name, "1", "onnxruntime_onnx", "fp32", inputs, outputs, 8, 2, task)


def deploy(served: Any, *blocks: BlockDescription) -> None:
    every = [*BLOCKS, *blocks]
    served.resolver.set_views([BlockView(b.block_id, b.model, b.version, BlockState.READY, "") for b in every])
    served.resolver.set_held_blocks({b.block_id: b for b in every})


def answers(served: Any, name: str, values: Any, **parameters: Any) -> None:
    def answer(request: InferRequest) -> InferResponse:
        rows = np.asarray(values, np.float32)[: request.inputs[-1].shape[0]]
        return InferResponse(request.model, "1", "", [from_array(name, rows)], Timing(), parameters)

    served.serving.answer = answer


def ranked(answer: httpx.Response) -> list[tuple[int, float]]:
    assert answer.status_code == 200, answer.text
    return [(result["index"], result["relevance_score"]) for result in answer.json()["results"]]


# --- by an embedder


async def test_an_embedder_gets_query_and_documents_at_once_and_cosines_decide(served, client):
    answers(served, "embedding", [[3, 4], [4, -3], [6, 8], [4, 3]], tokens=9)
    answer = await client.post("/v1/rerank", json=BODY, headers={"x-request-id": "r1"})
    found = answer.json()
    assert [result["index"] for result in found["results"]] == [1, 2, 0]
    np.testing.assert_allclose([result["relevance_score"] for result in found["results"]], [1, 0.96, 0], atol=1e-6)
    assert (found["id"], found["object"], found["model"]) == ("r1", "rerank", "embedder")
    assert found["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert found["meta"] == {"tokens": {"input_tokens": 9, "output_tokens": 0}}
    (asked,) = served.serving.requests
    assert asked.inputs == [Tensor("text", "BYTES", (4, 1), pack_bytes(["q", "a", "b", "c"]))]
    assert (asked.protocol, asked.size_bytes) == ("rest", len(asked.inputs[0].data))
    v1_schemas.RerankAnswer.model_validate(found)


async def test_a_vector_of_zeros_has_the_score_zero(served, client):
    answers(served, "embedding", [[3, 4], [0, 0], [-3, -4], [3, 4]])
    assert ranked(await client.post("/v1/rerank", json=BODY)) == [(2, 1.0), (0, 0.0), (1, -1.0)]


# --- by a scorer


async def test_a_scorer_gets_one_query_and_all_documents(served, client):
    deploy(served, scorer("ranker"))
    answers(served, "score", [[0.25], [0.5], [0.125]], tokens=30)
    answer = await client.post("/v1/rerank", json={**BODY, "model": "ranker"})
    assert ranked(answer) == [(1, 0.5), (0, 0.25), (2, 0.125)]
    query, passage = served.serving.last.inputs
    assert query == Tensor("query", "BYTES", (1, 1), pack_bytes(["q"]))
    assert passage == Tensor("passage", "BYTES", (3, 1), pack_bytes(["a", "b", "c"]))


async def test_equal_scores_keep_their_order_and_nan_comes_last(served, client):
    deploy(served, scorer("ranker"))
    answers(served, "score", [0.5, np.nan, 0.5])
    answer = await client.post("/v1/rerank", json={**BODY, "model": "ranker"})
    assert ranked(answer) == [(0, 0.5), (2, 0.5), (1, None)]
    answers(served, "score", [0, 1] * 50)
    answer = await client.post("/v1/rerank", json={**BODY, "model": "ranker", "documents": ["a"] * 100})
    assert [index for index, _ in ranked(answer)] == [*range(1, 100, 2), *range(0, 100, 2)]


@pytest.mark.parametrize(("top_n", "count"), [(1, 1), (2, 2), (99, 3), (None, 3)])
async def test_top_n_limits_the_results(served, client, top_n, count):
    answers(served, "embedding", [[1, 0], [0, 1], [1, 0], [1, 1]])
    answer = await client.post("/v1/rerank", json={**BODY, "top_n": top_n})
    assert [index for index, _ in ranked(answer)] == [1, 2, 0][:count]


async def test_documents_are_returned_on_request(served, client):
    answers(served, "embedding", [[1, 0], [0, 1], [1, 0], [1, 1]])
    documents = ["grüß dich", {"text": "b", "title": "B", "n": [1]}, {"text": "c"}]
    asked = {**BODY, "documents": documents, "max_tokens_per_doc": 5, "rank_fields": ["text"], "return_documents": True}
    results = (await client.post("/v1/rerank", json=asked)).json()["results"]
    assert [result["document"] for result in results] == [documents[1], documents[2], {"text": "grüß dich"}]
    assert unpack_bytes(served.serving.last.inputs[0])[1:] == ["grüß dich".encode(), b"b", b"c"]
    plain = (await client.post("/v1/rerank", json={**asked, "return_documents": False})).json()["results"]
    assert all(result.keys() == {"index", "relevance_score"} for result in plain)


# --- choice of the model


async def test_without_a_name_the_only_scorer_or_embedder_is_used(served, client):
    answers(served, "embedding", [[1, 0], [0, 1], [1, 0], [1, 1]])
    unnamed = {**BODY, "model": None}
    assert (await client.post("/v1/rerank", json=unnamed)).json()["model"] == "embedder"
    deploy(served, scorer("ranker"))
    answers(served, "score", [3, 2, 1])
    assert (await client.post("/v1/rerank", json=unnamed)).json()["model"] == "ranker"
    deploy(served, scorer("ranker"), scorer("other"))
    answer = await client.post("/v1/rerank", json=unnamed)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        404,
        "'model' is required; ready models for this task: other, ranker",
    )


async def test_a_model_of_another_task_is_refused_and_suitable_ones_are_named(served, client):
    deploy(served, scorer("ranker"))
    answer = await client.post("/v1/rerank", json={**BODY, "model": "enlarger"})
    assert answer.status_code == 400
    message = "model 'enlarger' has the task 'upscale', not 'score' or 'embed'; ready models for it: ranker, embedder"
    assert answer.json()["error"]["message"] == message
    assert (await client.post("/v1/rerank", json={**BODY, "model": "nobody"})).status_code == 404
    assert served.serving.requests == []


# --- refusals


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"query": ""}, "query"),
        ({"query": None}, "query"),
        ({"query": ["q"]}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": {"text": "a"}}, "documents"),
        ({"documents": ["a", 7]}, "documents.1"),
        ({"documents": ["a", {"title": "b"}]}, "documents.1"),
        ({"documents": [["a"]]}, "documents.0"),
        ({"top_n": 0}, "top_n"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": "2"}, "top_n"),
        ({"top_n": 1.5}, "top_n"),
        ({"return_documents": "yes"}, "return_documents"),
        ({"model": 7}, "model"),
        ({"model": ""}, "model"),
    ],
)
async def test_invalid_rerank_requests_are_refused(served, client, changed, word):
    answer = await client.post("/v1/rerank", json={**BODY, **changed})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
    assert f"'{word}'" in answer.json()["error"]["message"]
    assert served.serving.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"\xff"', b'{"query": "\\ud800"}', b"[" * 50_000])
async def test_broken_json_is_refused(client, body):
    answer = await client.post("/v1/rerank", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


async def test_refusals_and_the_wrong_content_type_have_their_status(served, client):
    answer = await client.post("/v1/rerank", content=b"a=b", headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "send application/json" in answer.json()["error"]["message"]
    answer = await client.post("/v1/rerank", json={**BODY, "documents": ["x" * 100_000]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "request_too_large")
    served.serving.error = QueueFull("full")
    answer = await client.post("/v1/rerank", json=BODY, headers={"x-request-id": "abc"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert (answer.headers["x-request-id"], answer.json()["error"]["code"]) == ("abc", "queue_full")
    assert (await client.get("/v1/rerank")).status_code == 405


async def test_headers_set_timeout_and_trace(served, client):
    answers(served, "embedding", [[1, 0]] * 4)
    headers = {"x-request-timeout-ms": "250", "traceparent": "00-1-2-01"}
    await client.post("/v1/rerank", json=BODY, headers=headers)
    assert (served.serving.last.timeout_s, served.serving.last.traceparent) == (0.25, "00-1-2-01")
    answer = await client.post("/v1/rerank", json=BODY, headers={"x-request-timeout-ms": "soon"})
    assert answer.status_code == 400


async def test_the_path_of_coheres_version_2_works(served, client):
    answers(served, "embedding", [[1, 0], [0, 1], [1, 0], [1, 1]])
    assert [index for index, _ in ranked(await client.post("/v2/rerank", json=BODY))] == [1, 2, 0]
    answer = await client.post("/v2/rerank", json={**BODY, "top_n": 0})
    assert "top_n" in answer.json()["error"]


async def test_a_disconnect_cancels_the_request(served):
    served.serving.delay_s = 60
    first = {"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}

    async def receive() -> dict[str, Any]:
        if first:
            message = dict(first)
            first.clear()
            return message
        await served.serving.is_called.wait()
        return {"type": "http.disconnect"}

    async with asyncio.timeout(20):
        await call(served, receive)
    assert served.serving.cancelled == 1


async def call(served: Any, receive: Callable[[], Any]) -> None:
    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/rerank", "query_string": b"", "headers": []}
    await served.app({**scope, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["embedder", "ranker"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["text", "title"]) | st.text(), inner),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.fixed_dictionaries(
        {"query": st.text() | TREES, "documents": st.lists(st.text() | TREES, max_size=4) | TREES},
        optional={"model": TREES, "top_n": st.integers() | TREES, "return_documents": st.booleans() | TREES},
    )
)
async def test_arbitrary_messages_are_answered(served, body):
    answers(served, "embedding", np.ones((200, 2)))
    transport = httpx.ASGITransport(app=served.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
        answer = await client.post("/v1/rerank", content=json.dumps(body).encode())
    assert answer.status_code < 500
    assert answer.status_code == 200 or answer.json()["error"]["message"]
