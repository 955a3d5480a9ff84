"""tritonclient with a model that scores pairs: two inputs of text, over gRPC and HTTP."""

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

QUERY = "a small animal that purrs"
PASSAGES = ["A purring kitten.", "The motor of the ship was repaired.", ""]


@pytest.fixture(params=["grpc", "http"])
def triton(server, minilm, request) -> Any:
    """Yield the client's module and an open client."""
    module, url = {
        "grpc": (tritonclient.grpc, server.grpc),
        "http": (tritonclient.http, f"127.0.0.1:{server.http_port}"),
    }[request.param]
    client = module.InferenceServerClient(url)
    yield module, client
    client.close()


def infer(triton: Any, **texts: list[list[str]]) -> Any:
    module, client = triton
    inputs = []
    for name, rows in texts.items():
        array = np.array(rows, dtype=object)
        inputs.append(module.InferInput(name, array.shape, "BYTES"))
        inputs[-1].set_data_from_numpy(array)
    return client.infer("pairs", inputs)


def column(texts: list[str]) -> list[list[str]]:
    return [[text] for text in texts]


def test_pairs_and_one_query_for_all_passages_are_scored(triton):
    by_pairs = infer(triton, query=column([QUERY] * 3), passage=column(PASSAGES)).as_numpy("score")
    by_one = infer(triton, query=[[QUERY]], passage=column(PASSAGES)).as_numpy("score")
    assert (by_pairs.shape, by_pairs.dtype) == ((3, 1), np.float32)
    np.testing.assert_allclose(by_one, by_pairs, atol=2e-2)
    assert by_pairs.argmax() == 0


def test_mismatched_rows_are_refused(triton):
    with pytest.raises(InferenceServerException, match="2 queries for 3 passages"):
        infer(triton, query=column(PASSAGES[:2]), passage=column(PASSAGES))
    with pytest.raises(InferenceServerException, match="passage"):
        infer(triton, query=[[QUERY]])


def test_config_and_metadata_describe_both_inputs(triton):
    module, client = triton
    if module is tritonclient.grpc:
        config = client.get_model_config("pairs", as_json=True)["config"]
        metadata = client.get_model_metadata("pairs", as_json=True)
    else:
        config, metadata = client.get_model_config("pairs"), client.get_model_metadata("pairs")
    assert [(item["name"], item["data_type"], list(map(int, item["dims"]))) for item in config["input"]] == [
        ("query", "TYPE_STRING", [1]),
        ("passage", "TYPE_STRING", [1]),
    ]
    assert [(item["name"], item["data_type"], list(map(int, item["dims"]))) for item in config["output"]] == [
        ("score", "TYPE_FP32", [1])
    ]
    assert config["max_batch_size"] > 1
    assert config["parameters"]["task"]["string_value"] == "score"
    assert [item["name"] for item in metadata["inputs"]] == ["query", "passage"]
    assert [list(map(int, item["shape"])) for item in metadata["inputs"]] == [[-1, 1], [-1, 1]]
