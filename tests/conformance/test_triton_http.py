"""The unmodified tritonclient.http and tritonclient.http.aio."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from benchmarks.server import ServerProcess
from tests.servers import IDENTITY_TYPES

VALUES: dict[str, list[list[Any]]] = {
    "BOOL": [[True, False]],
    "BYTES": [["plain", "zażółć"]],
    **{name: [[1, 100]] for name in IDENTITY_TYPES if "INT" in name},
    **{name: [[0.5, -2.0]] for name in ("FP16", "FP32", "FP64", "BF16")},
}


@pytest.fixture
def client(server: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.http_url.removeprefix("http://"), concurrency=4) as opened:
        yield opened


@pytest.fixture
async def aio_client(server: ServerProcess) -> AsyncIterator[triton_aio.InferenceServerClient]:
    async with triton_aio.InferenceServerClient(server.http_url.removeprefix("http://")) as opened:
        yield opened


def values(datatype: str) -> np.ndarray:
    kind = object if datatype == "BYTES" else triton_to_np_dtype(datatype)
    return np.array(VALUES[datatype], dtype=kind)


def given(name: str, array: np.ndarray, datatype: str, binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def check(found: np.ndarray, sent: np.ndarray, is_binary: bool = True) -> None:
    if sent.dtype == object:
        expected = [[text.encode() if is_binary else text for text in row] for row in sent.tolist()]
        assert found.tolist() == expected
    else:
        np.testing.assert_array_equal(found, sent)


def test_health_and_metadata_are_returned(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("identity_fp32")
    assert client.is_model_ready("identity_fp32", "1")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata()["name"] == "penstock"
    metadata = client.get_model_metadata("identity_fp32", "1")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
    assert metadata["versions"] == ["1"]


def test_the_config_is_returned(client):
    config = client.get_model_config("identity_int64")
    assert config["max_batch_size"] > 0
    assert config["input"][0]["data_type"] == "TYPE_INT64"
    assert config["input"][0]["dims"] == [-1]


@pytest.mark.parametrize("datatype", IDENTITY_TYPES)
def test_every_datatype_as_binary(client, datatype):
    sent = values(datatype)
    answer = client.infer(f"identity_{datatype.lower()}", [given("x", sent, datatype)])
    check(answer.as_numpy("y"), sent)
    assert "binary_data_size" in answer.get_output("y")["parameters"]


@pytest.mark.parametrize("datatype", [name for name in IDENTITY_TYPES if name not in ("FP16", "BF16")])
def test_every_datatype_as_json(client, datatype):
    sent = values(datatype)
    wanted = [triton.InferRequestedOutput("y", binary_data=False)]
    answer = client.infer(f"identity_{datatype.lower()}", [given("x", sent, datatype, False)], outputs=wanted)
    check(answer.as_numpy("y"), sent, is_binary=False)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_fp16_outputs_must_be_requested_as_binary(client, datatype):
    wanted = [triton.InferRequestedOutput("y", binary_data=False)]
    with pytest.raises(InferenceServerException, match="binary_data") as caught:
        client.infer(f"identity_{datatype.lower()}", [given("x", values(datatype), datatype)], outputs=wanted)
    assert caught.value.status() == "400"


def test_undecodable_bytes_are_returned(client, photo):
    sent = [given("image", np.array([[photo]], dtype=object), "BYTES")]
    wanted = [triton.InferRequestedOutput("image", binary_data=False)]
    with pytest.raises(InferenceServerException, match="UTF-8") as caught:
        client.infer("srcnn", sent, outputs=wanted)
    assert caught.value.status() == "400"


def test_several_tensors_in_mixed_forms_are_accepted(client):
    a, b = np.array([[1, 2, 3, 4]], np.int32), np.array([[10, 20, 30, 40]], np.int32)
    inputs = [given("a", a, "INT32"), given("b", b, "INT32", binary=False)]
    outputs = [triton.InferRequestedOutput("difference"), triton.InferRequestedOutput("sum", binary_data=False)]
    answer = client.infer("add_sub", inputs, outputs=outputs, request_id="r7", parameters={"mine": "yes"})
    np.testing.assert_array_equal(answer.as_numpy("sum"), a + b)
    np.testing.assert_array_equal(answer.as_numpy("difference"), a - b)
    found = answer.get_response()
    assert [output["name"] for output in found["outputs"]] == ["difference", "sum"]
    assert (found["id"], found["model_name"], found["model_version"]) == ("r7", "add_sub", "1")
    assert found["parameters"]["mine"] == "yes"


def test_outputs_can_be_selected(client):
    a = np.array([[1, 2, 3, 4]], np.int32)
    inputs = [given("a", a, "INT32"), given("b", a, "INT32")]
    answer = client.infer("add_sub", inputs, outputs=[triton.InferRequestedOutput("sum")])
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["sum"]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_both_directions_can_be_compressed(client, algorithm):
    sent = np.zeros((2, 50_000), np.float32)
    answer = client.infer(
        "identity_fp32",
        [given("x", sent, "FP32")],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(answer.as_numpy("y"), sent)


def test_asynchronous_requests_are_answered(client):
    sent = [np.full((1, 3), index, np.float32) for index in range(20)]
    running = [client.async_infer("identity_fp32", [given("x", array, "FP32")]) for array in sent]
    for array, handle in zip(sent, running, strict=True):
        np.testing.assert_array_equal(handle.get_result().as_numpy("y"), array)


def test_prepared_bodies_are_accepted(client):
    sent = np.ones((1, 2), np.float32)
    body, length = triton.InferenceServerClient.generate_request_body([given("x", sent, "FP32")])
    headers = {"Inference-Header-Content-Length": str(length)}
    response = client._post("v2/models/identity_fp32/infer", body, headers, None)
    assert response.status_code == 200
    parsed = triton.InferenceServerClient.parse_response_body(
        response.read(), header_length=int(response.get("Inference-Header-Content-Length"))
    )
    np.testing.assert_array_equal(parsed.as_numpy("y"), sent)


def test_a_raw_binary_request_is_answered(client):
    sent = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
    body = b"picture"
    response = client._post("v2/models/identity_bytes/infer", body, {"Inference-Header-Content-Length": "0"}, None)
    length = int(response.get("Inference-Header-Content-Length"))
    parsed = triton.InferenceServerClient.parse_response_body(response.read(), header_length=length)
    assert parsed.as_numpy("y").tolist() == [[b"picture"]]
    two_inputs = client._post("v2/models/add_sub/infer", sent.tobytes(), {"Inference-Header-Content-Length": "0"}, None)
    assert two_inputs.status_code == 400


def test_statistics_count_requests(client):
    before = client.get_inference_statistics("identity_int8")["model_stats"][0]["inference_count"]
    for _ in range(3):
        client.infer("identity_int8", [given("x", np.ones((1, 1), np.int8), "INT8")])
    (found,) = client.get_inference_statistics("identity_int8", "1")["model_stats"]
    assert found["inference_count"] == before + 3
    assert found["inference_stats"]["compute_infer"]["ns"] > 0
    names = {entry["name"] for entry in client.get_inference_statistics()["model_stats"]}
    assert {"identity_int8", "add_sub"} <= names


def test_models_are_loaded_and_unloaded(client):
    index = {entry["name"]: entry["state"] for entry in client.get_model_repository_index()}
    assert index["identity_uint16"] == "READY"
    client.unload_model("identity_uint16")
    assert not client.is_model_ready("identity_uint16")
    with pytest.raises(InferenceServerException) as caught:
        client.infer("identity_uint16", [given("x", np.ones((1, 1), np.uint16), "UINT16")])
    assert caught.value.status() == "503"
    client.load_model("identity_uint16")
    assert client.is_model_ready("identity_uint16")
    with pytest.raises(InferenceServerException):
        client.load_model("nobody")
    with pytest.raises(InferenceServerException, match="config"):
        client.load_model("identity_uint16", config="{}")


def test_errors_have_statuses_and_messages(client):
    ones = np.ones((1, 2), np.float32)
    for model, array, datatype, status in [
        ("nobody", ones, "FP32", "404"),
        ("identity_int32", ones, "FP32", "400"),
        ("add_sub", ones, "FP32", "400"),
        ("identity_fp32", np.ones((1, 2, 3), np.float32), "FP32", "400"),
    ]:
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, [given("x", array, datatype)])
        assert caught.value.status() == status
        assert caught.value.message()
    with pytest.raises(InferenceServerException, match="unknown output"):
        client.infer("identity_fp32", [given("x", ones, "FP32")], outputs=[triton.InferRequestedOutput("z")])
    with pytest.raises(InferenceServerException, match="no version"):
        client.infer("identity_fp32", [given("x", ones, "FP32")], model_version="9")


def test_texts_are_embedded(client, minilm):
    texts = np.array(["a photograph of a fig", "zażółć gęślą jaźń"], dtype=object)
    found = client.infer(minilm, [given("text", texts, "BYTES")]).as_numpy("embedding")
    assert found.shape == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-3)


def test_images_are_upscaled(client, photo):
    sent = np.array([[photo]], dtype=object)
    (image,) = client.infer("srcnn", [given("image", sent, "BYTES")]).as_numpy("image").ravel()
    assert image.startswith(b"\x89PNG")


@pytest.mark.parametrize("datatype", IDENTITY_TYPES)
async def test_every_datatype_round_trips_with_the_aio_client(aio_client, datatype):
    sent = values(datatype)
    answer = await aio_client.infer(f"identity_{datatype.lower()}", [given("x", sent, datatype)])
    check(answer.as_numpy("y"), sent)


async def test_the_aio_client_reads_metadata_and_loads_models(aio_client):
    assert await aio_client.is_server_live()
    assert await aio_client.is_server_ready()
    assert await aio_client.is_model_ready("add_sub")
    assert not await aio_client.is_model_ready("nobody")
    assert (await aio_client.get_model_metadata("add_sub"))["name"] == "add_sub"
    assert (await aio_client.get_model_config("add_sub"))["name"] == "add_sub"
    assert (await aio_client.get_inference_statistics("add_sub"))["model_stats"][0]["name"] == "add_sub"
    assert any(entry["name"] == "add_sub" for entry in await aio_client.get_model_repository_index())
    with pytest.raises(InferenceServerException, match="unknown model"):
        await aio_client.get_model_metadata("nobody")


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
async def test_the_aio_client_compresses(aio_client, algorithm):
    sent = np.zeros((1, 50_000), np.float32)
    answer = await aio_client.infer(
        "identity_fp32",
        [given("x", sent, "FP32")],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(answer.as_numpy("y"), sent)
