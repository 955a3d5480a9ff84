"""Score and classify models of a real server: over gRPC and REST, prepared in the worker and in task processes."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from benchmarks.server import ServerProcess
from penstock.core.tensors import pack_bytes
from penstock.engines.onnx.bert_file import find_minilm_weights
from penstock.models.importing import import_checkpoint
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.checkpoints import compute_reference_logits, save_classifier
from tests.digits import GRAY, NAMES, png, train_classifier, write_digits

WAIT_S = 120.0
DATA = Path(__file__).parents[1] / "data"
TEXTS: list[str] = json.loads((DATA / "minilm_reference.json").read_text())
VECTORS = np.load(DATA / "minilm_reference.npz")["vectors"]
PLACEMENTS = ("inline", "pool")
PASSAGES = ["The gate meters water.", "Cats purr.", "", "word " * 2000]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("cross"), ["relevance"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("score-and-classify")
    models = folder / "models"
    for name, source in (("cosine", find_minilm_weights()), ("cross", checkpoint)):
        import_checkpoint(source, models / f"{name}-inline", "score", "onnx")
        (models / f"{name}-pool").mkdir()
        (models / f"{name}-pool" / "1").symlink_to(models / f"{name}-inline" / "1")
        settings = (models / f"{name}-inline" / "model.yaml").read_text() + "instances: {count: 1}\n"
        for placement in PLACEMENTS:
            (models / f"{name}-{placement}" / "model.yaml").write_text(f"{settings}placement: {placement}\n")
    for placement in PLACEMENTS:
        settings = f"{GRAY}placement: {placement}\ninstances: {{count: 1}}\n"
        write_digits(models, f"digits-{placement}", ["n", 1, 8, 8], settings)
        write_digits(models, f"pixels-{placement}", ["n", 64], f"placement: {placement}\n")
    with ServerProcess(models, folder, environment={"PENSTOCK_WORKER__TASK_PROCESSES": "1"}) as running:
        yield running


def infer_rest(server: ServerProcess, model: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = httpx.post(f"{server.http_url}/v2/models/{model}/infer", json=body, timeout=WAIT_S)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(name: str, elements: list[str]) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(elements), 1], "data": elements}


def outputs(answer: dict[str, Any]) -> dict[str, list[Any]]:
    return {each["name"]: np.reshape(each["data"], each["shape"]).tolist() for each in answer["outputs"]}


def infer_grpc(server: ServerProcess, message: pb.ModelInferRequest) -> pb.ModelInferResponse:
    with grpc.insecure_channel(server.grpc) as channel:
        response: pb.ModelInferResponse = GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=WAIT_S)
        return response


def message(model: str, **columns: list[bytes]) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=model)
    for name, elements in columns.items():
        made.inputs.add(name=name, datatype="BYTES", shape=[len(elements), 1])
        made.raw_input_contents.append(pack_bytes(elements))
    return made


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_cosines_equal_the_reference(server: ServerProcess, placement: str) -> None:
    body = {"inputs": [texts("query", TEXTS[:1]), texts("passage", TEXTS[1:9])]}
    answer = infer_rest(server, f"cosine-{placement}", body)
    expected = VECTORS[1:9] @ VECTORS[0]
    np.testing.assert_allclose(np.array(outputs(answer)["score"])[:, 0], expected, atol=1e-3)
    assert answer["parameters"]["tokens"] > 9
    response = infer_grpc(
        server,
        message(f"cosine-{placement}", query=[TEXTS[0].encode()], passage=[text.encode() for text in TEXTS[1:9]]),
    )
    np.testing.assert_allclose(np.frombuffer(response.raw_output_contents[0], np.float32), expected, atol=1e-3)
    assert response.parameters["tokens"].int64_param == answer["parameters"]["tokens"]
    assert list(response.outputs[0].shape) == [8, 1]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_cross_encoder_scores_equal_those_of_transformers(
    server: ServerProcess, placement: str, checkpoint: Path
) -> None:
    logits = compute_reference_logits(checkpoint, ["what does a gate do?"] * len(PASSAGES), PASSAGES)
    body = {"inputs": [texts("query", ["what does a gate do?"]), texts("passage", PASSAGES)]}
    scores = outputs(infer_rest(server, f"cross-{placement}", body))["score"]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), atol=1e-4)


def test_concurrent_requests_get_the_same_answers_as_single_ones(server: ServerProcess) -> None:
    def ask(passages: list[str], placement: str) -> Any:
        body = {"inputs": [texts("query", ["a query"]), texts("passage", passages)]}
        return outputs(infer_rest(server, f"cosine-{placement}", body))["score"]

    asked = [(TEXTS[index : index + 3], placement) for index in range(0, 18, 3) for placement in PLACEMENTS]
    alone = [ask(*each) for each in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda each: ask(*each), asked))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_digits_are_classified(server: ServerProcess, placement: str) -> None:
    _, pixels, truth = train_classifier()
    response = infer_grpc(server, message(f"digits-{placement}", image=[png(row) for row in pixels[:32]]))
    assert [(output.name, list(output.shape)) for output in response.outputs] == [
        ("label", [32, 1]),
        ("score", [32, 1]),
    ]
    found = [part.decode() for part in _elements(response.raw_output_contents[0], 32)]
    assert np.mean([name == NAMES[digit] for name, digit in zip(found, truth[:32], strict=True)]) > 0.9


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tensors_and_images_of_a_digit_get_the_same_answer(server: ServerProcess, placement: str) -> None:
    row = train_classifier()[1][0]
    tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": row.tolist()}
    body = {"inputs": [tensor], "outputs": [{"name": "label"}], "parameters": {"top_k": 3}}
    labels = outputs(infer_rest(server, f"pixels-{placement}", body))
    assert list(labels) == ["label"]
    made = message(f"digits-{placement}", image=[png(row)])
    made.parameters["top_k"].int64_param = 3
    found = [part.decode() for part in _elements(infer_grpc(server, made).raw_output_contents[0], 3)]
    assert labels["label"] == [found]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("model", "inputs", "parameters", "reason"),
    [
        ("digits", [texts("image", [base64.b64encode(b"no image").decode()])], {}, "not a JPEG or PNG image"),
        ("pixels", [{"name": "pixels", "datatype": "FP64", "shape": [1, 64], "data": [0] * 64}], {}, "takes FP32"),
        (
            "pixels",
            [{"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": [0] * 64}],
            {"top_k": 11},
            "from 1 to 10, got 11",
        ),
        ("cross", [texts("query", ["a", "b"]), texts("passage", ["c"])], {}, "2 queries for 1 passages"),
        ("cosine", [texts("query", ["a"])], {}, "takes two inputs"),
    ],
)
def test_errors_are_reported(
    server: ServerProcess, placement: str, model: str, inputs: Any, parameters: dict[str, int], reason: str
) -> None:
    body = {"inputs": inputs, "parameters": parameters}
    assert reason in infer_rest(server, f"{model}-{placement}", body, status=400)["error"]


def test_clients_see_the_signatures(server: ServerProcess) -> None:
    described = httpx.get(f"{server.http_url}/v2/models/cross-pool", timeout=WAIT_S).json()
    assert [(each["name"], each["datatype"], each["shape"]) for each in described["inputs"]] == [
        ("query", "BYTES", [-1, 1]),
        ("passage", "BYTES", [-1, 1]),
    ]
    config = httpx.get(f"{server.http_url}/v2/models/digits-pool/config", timeout=WAIT_S).json()
    assert config["max_batch_size"] == 32


def _elements(raw: bytes, count: int) -> list[bytes]:
    found: list[bytes] = []
    start = 0
    for _ in range(count):
        end = start + 4 + int.from_bytes(raw[start : start + 4], "little")
        found.append(raw[start + 4 : end])
        start = end
    return found
