"""Scores, ranks and labels of a real server, through every endpoint: REST, gRPC, WebSocket, clients and commands."""

import json
import socket
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper
from PIL import Image
from typer.testing import CliRunner
from websockets.sync.client import connect

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from penstock.cli import main as cli
from penstock.client import AsyncClient, Client
from penstock.core.errors import InvalidImage, InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.tensors import Array
from penstock.models.samples import texts
from tests.servers import ROOT, write_model

QUERY = texts.queries()[3]
DOCUMENTS = [*texts.passages()[:20], *texts.queries()[:10]]
SCORERS = ["encoder", "pairs"]
COLORS = {"red": (250, 10, 10), "green": (10, 250, 10), "blue": (10, 10, 250)}
# FP32: a text has the same vector in any batch, so ranks are reproducible.
SETTINGS = "engine: onnx\nprecision: fp32\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("ranking")
    models = folder / "models"
    for name, task in (("encoder", "embed"), ("pairs", "score")):
        (models / name).mkdir(parents=True)
        (models / name / "1").symlink_to(ROOT / "models/minilm/1")
        (models / name / "model.yaml").write_text(f"task: {task}\n{SETTINGS}")
    write_classifier(models, "colors", ["n", 3, 8, 8], "std: [1, 1, 1]\n  mean: [0, 0, 0]\n  top_k: 2")
    write_classifier(models, "numbers", ["n", 3, 1, 1], "input: tensor")
    with ServerProcess(models, folder) as running:
        yield running


def write_classifier(models: Path, name: str, shape: list[Any], options: str) -> None:
    """Write a classifier whose scores are the means of three colour channels."""
    graph = helper.make_graph(
        [
            helper.make_node("GlobalAveragePool", ["pixels"], ["means"]),
            helper.make_node("Flatten", ["means"], ["logits"]),
        ],
        "colors",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])],
    )
    write_model(models, name, graph)
    (models / name / "model.yaml").write_text(f"task: classify\nclassify:\n  {options}\n")
    (models / name / "1" / "labels.txt").write_text("\n".join(COLORS))


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> Array:
    """Return the cosines that numpy computes of vectors that were embedded one at a time."""
    with Client(server.grpc) as client:
        query, *documents = (client.embed([text], "encoder")[0] for text in [QUERY, *DOCUMENTS])
    vectors = np.array(documents)
    found: Array = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    return found


def rerank(server: ServerProcess, **body: Any) -> dict[str, Any]:
    asked = {"query": QUERY, "documents": DOCUMENTS, **body}
    answer = httpx.post(f"{server.http_url}/v1/rerank", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_ranks(found: list[tuple[int, float]], expected: Array) -> None:
    assert [index for index, _ in found] == np.argsort(-expected).tolist()
    np.testing.assert_allclose([score for _, score in found], np.sort(expected)[::-1], atol=1e-4)


# --- ranks


@pytest.mark.parametrize("model", SCORERS)
def test_the_order_over_rest_is_that_of_the_cosines(server: ServerProcess, expected: Array, model: str) -> None:
    found = rerank(server, model=model)
    check_ranks([(result["index"], result["relevance_score"]) for result in found["results"]], expected)
    assert found["model"] == model
    assert found["usage"]["total_tokens"] > 1000
    few = rerank(server, model=model, top_n=3, return_documents=True)["results"]
    assert [result["document"]["text"] for result in few] == [DOCUMENTS[i] for i in np.argsort(-expected)[:3]]


def test_without_a_name_the_scorer_is_used(server: ServerProcess) -> None:
    assert rerank(server, documents=["a"])["model"] == "pairs"


@pytest.mark.parametrize("model", SCORERS)
async def test_both_clients_give_the_same_ranks(server: ServerProcess, expected: Array, model: str) -> None:
    with Client(server.grpc) as client:
        np.testing.assert_allclose(client.score(QUERY, DOCUMENTS, model), expected, atol=1e-4)
        # One query for each passage.
        np.testing.assert_allclose(client.score(DOCUMENTS, [QUERY] * len(DOCUMENTS), model), expected, atol=1e-4)
    async with AsyncClient(server.grpc) as client:
        check_ranks(await client.rerank(QUERY, DOCUMENTS, model=model), expected)
        assert len(await client.rerank(QUERY, DOCUMENTS, 4, model)) == 4


# --- pairs over the other endpoints


def infer(server: ServerProcess, **request: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.http_url}/v1/infer", timeout=60, **request)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_pairs_are_scored_with_plain_values_over_rest(server: ServerProcess, expected: Array) -> None:
    inputs = {"query": QUERY, "passage": DOCUMENTS}
    found = infer(server, json={"model": "pairs", "inputs": inputs})
    np.testing.assert_allclose(np.ravel(found["outputs"]["score"]), expected, atol=1e-4)
    assert found["parameters"]["tokens"] > 1000
    one = infer(server, json={"model": "pairs", "inputs": {"query": QUERY, "passage": DOCUMENTS[0]}})
    np.testing.assert_allclose(one["outputs"]["score"], [[expected[0]]], atol=1e-4)
    form = [("model", "pairs"), ("query", QUERY), *(("passage", text) for text in DOCUMENTS[:3])]
    found = infer(server, files=[(name, (None, value)) for name, value in form])
    np.testing.assert_allclose(np.ravel(found["outputs"]["score"]), expected[:3], atol=1e-4)


def test_pairs_are_scored_over_a_websocket(server: ServerProcess, expected: Array) -> None:
    inputs = [
        {"name": "query", "datatype": "BYTES", "shape": [1], "data": [QUERY]},
        {"name": "passage", "datatype": "BYTES", "shape": [2, 1], "data": DOCUMENTS[:2]},
    ]
    url = f"ws://127.0.0.1:{server.http_port}/v2/models/pairs/stream"
    with connect(url, proxy=None) as opened:
        opened.send(json.dumps({"id": "1", "inputs": inputs}))
        found = json.loads(opened.recv(timeout=60))
    np.testing.assert_allclose(found["outputs"][0]["data"], expected[:2], atol=1e-4)
    assert found["outputs"][0]["shape"] == [2, 1]


# --- refusals


def refusal(server: ServerProcess, **body: Any) -> tuple[int, str, str]:
    asked = {"model": "pairs", "query": QUERY, "documents": ["a", "b"], **body}
    answer = httpx.post(f"{server.http_url}/v1/rerank", json=asked, timeout=60)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


@pytest.mark.parametrize("model", SCORERS)
def test_invalid_reranks_are_refused(server: ServerProcess, model: str) -> None:
    assert refusal(server, model=model, documents=[])[:2] == (400, "invalid_request")
    assert refusal(server, model=model, query="")[:2] == (400, "invalid_request")
    assert refusal(server, model=model, documents=["a", {"title": "b"}])[:2] == (400, "invalid_request")
    status, code, message = refusal(server, model=model, documents=["a"] * 5000)
    assert (status, code) == (429, "request_too_large")
    assert "limits.max_rows" in message
    assert "ready models for it: pairs, encoder" in refusal(server, model="colors")[2]
    assert refusal(server, model="nobody")[:2] == (404, "unknown_model")
    assert rerank(server, model=model, documents=["", " ", "\0", "a"])["results"]


def test_a_deadline_ends_a_rerank(server: ServerProcess) -> None:
    asked = {"model": "pairs", "query": QUERY, "documents": texts.passages()}
    headers = {"x-request-timeout-ms": "50"}
    answer = httpx.post(f"{server.http_url}/v1/rerank", json=asked, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


def block(server: ServerProcess) -> str:
    return next(str(found["block_id"]) for found in server.status()["blocks"] if found["model"] == "encoder")


def test_a_disconnect_cancels_the_rerank(server: ServerProcess) -> None:
    body = json.dumps({"model": "encoder", "query": QUERY, "documents": texts.passages()}).encode()
    head = f"POST /v1/rerank HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.http_port)) as endpoint:
        endpoint.sendall(head + body)
        eventually(lambda: sum(server.status()["queues"][block(server)].values()), "the request is inside")
    eventually(
        lambda: server.metric("penstock_requests", model="encoder", protocol="rest", code="cancelled") == 1,
        "the request was cancelled",
    )


def test_invalid_pairs_are_refused(server: ServerProcess) -> None:
    with Client(server.grpc) as client:
        two, three = (np.array(["a"] * count, dtype=object) for count in (2, 3))
        with pytest.raises(InvalidTensor, match="2 queries for 3 passages"):
            client.infer("pairs", {"query": two, "passage": three})
        with pytest.raises(InvalidTensor, match="passage"):
            client.infer("pairs", {"query": two})
        with pytest.raises(InvalidTensor, match="UTF-8"):
            client.infer("pairs", {"query": np.array([b"\xff"], dtype=object), "passage": two})
        with pytest.raises(RequestTooLarge, match=r"limits\.max_rows"):
            client.score("a", ["b"] * 5000, "pairs")
        with pytest.raises(InvalidRequest, match="has the task 'classify'"):
            client.rerank("a", ["b"], model="colors")


# --- labels


def picture(color: str) -> bytes:
    kept = BytesIO()
    Image.new("RGB", (20, 12), COLORS[color]).save(kept, "PNG")
    return kept.getvalue()


async def test_images_and_arrays_are_labelled(server: ServerProcess) -> None:
    images = [picture(color) for color in COLORS]
    array = np.eye(3).reshape(3, 3, 1, 1)
    async with AsyncClient(server.grpc) as client:
        by_images = await client.classify(images, "colors")
        by_array = await client.classify(array, "numbers", top_k=3)
    assert [row[0][0] for row in by_images] == list(COLORS)
    assert {len(row) for row in by_images} == {2}  # as in the model's settings
    assert by_images[0][0][1] > by_images[0][1][1]
    assert [row[0][0] for row in by_array] == list(COLORS)
    assert all(sum(score for _, score in row) == pytest.approx(1) for row in by_array)


def test_invalid_classifications_are_refused(server: ServerProcess) -> None:
    with Client(server.grpc) as client:
        with pytest.raises(InvalidImage):
            client.classify([b"no image"], "colors")
        with pytest.raises(InvalidTensor):
            client.classify(["a text"], "colors")
        with pytest.raises(InvalidRequest, match="one array is not enough"):
            client.classify(np.zeros((1, 3, 8, 8)), "colors")
        with pytest.raises(InvalidRequest, match="top_k"):
            client.classify([picture("red")], "colors", top_k=4)


# --- commands


def run(server: ServerProcess, *arguments: str, stdin: str = "", code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, [*arguments, "--server", server.grpc], input=stdin)
    assert done.exit_code == code, done.output
    return done.stdout


def test_rerank_reads_arguments_a_file_and_stdin(server: ServerProcess, expected: Array, tmp_path: Path) -> None:
    by_stdin = run(server, "rerank", QUERY, "--model", "pairs", "--json", stdin="\n".join(DOCUMENTS))
    results = json.loads(by_stdin)["results"]
    check_ranks([(result["index"], result["score"]) for result in results], expected)
    assert [result["document"] for result in results] == [DOCUMENTS[result["index"]] for result in results]
    file = tmp_path / "documents.txt"
    file.write_text("\n".join(DOCUMENTS * 5), encoding="utf-8")  # more than one request
    best = json.loads(run(server, "rerank", QUERY, "--file", str(file), "--model", "encoder", "--top-n", "7", "--json"))
    assert [result["document"] for result in best["results"][:5]] == [DOCUMENTS[int(np.argmax(expected))]] * 5
    assert len(best["results"]) == 7
    shown = run(server, "rerank", QUERY, *DOCUMENTS[:2], "--model", "encoder").splitlines()
    np.testing.assert_allclose([float(line.split()[0]) for line in shown], sorted(expected[:2])[::-1], atol=1e-3)
    assert [int(line.split()[1]) for line in shown] == np.argsort(-expected[:2]).tolist()


def test_classify_reads_files_and_arrays(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(picture("red"))
    (tmp_path / "text.png").write_text("no image")
    np.save(tmp_path / "rows.npy", np.eye(3)[:2].reshape(2, 3, 1, 1))
    files = [str(tmp_path / name) for name in ("red.png", "text.png", "missing.png")]
    found = json.loads(run(server, "classify", *files, "--model", "colors", "--top-k", "1", "--json", code=2))
    assert [label["label"] for label in found[0]["labels"]] == ["red"]
    assert "is not a JPEG or PNG" in found[1]["problem"]
    assert found[2]["problem"] == f"{files[2]}: cannot be read: No such file or directory"
    rows = run(server, "classify", str(tmp_path / "rows.npy"), "--model", "numbers").splitlines()
    assert [line.split(": ")[1].split()[0] for line in rows] == ["red", "green"]


def test_infer_scores_pairs(server: ServerProcess, expected: Array) -> None:
    pairs = ("--input", f"query={QUERY}", "--input", f"passage={json.dumps(DOCUMENTS[:3])}")
    (output,) = json.loads(run(server, "infer", "pairs", *pairs, "--json"))
    np.testing.assert_allclose(output["data"], expected[:3], atol=1e-4)
