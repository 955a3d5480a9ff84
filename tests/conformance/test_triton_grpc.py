"""The unmodified tritonclient.grpc and tritonclient.grpc.aio."""

import asyncio
import itertools
import queue
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from tests.servers import IDENTITY_TYPES

SERVICE = "inference.GRPCInferenceService"
WAIT_S = 30.0
VALUES: dict[str, list[list[Any]]] = {
    "BOOL": [[True, False]],
    "BYTES": [[b"plain", "zażółć".encode(), b""]],
    **{name: [[1, 100]] for name in IDENTITY_TYPES if "INT" in name},
    **{name: [[0.5, -2.0]] for name in ("FP16", "FP32", "FP64", "BF16")},
}
A = np.array([[1, 2, 3, 4]], np.int32)
B = np.array([[10, 20, 30, 40]], np.int32)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc) as opened:
        yield opened


@pytest.fixture
async def aio_client(server: ServerProcess) -> AsyncIterator[triton_aio.InferenceServerClient]:
    async with triton_aio.InferenceServerClient(server.grpc) as opened:
        yield opened


@pytest.fixture
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as opened:
        yield opened


def values(datatype: str) -> np.ndarray:
    kind = object if datatype == "BYTES" else triton_to_np_dtype(datatype)
    return np.array(VALUES[datatype], dtype=kind)


def given(name: str, array: np.ndarray, datatype: str) -> triton.InferInput:
    return triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)


def floats(*shape: int, value: float = 1.0) -> list[triton.InferInput]:
    return [given("x", np.full(shape, value, np.float32), "FP32")]


def add_sub() -> list[triton.InferInput]:
    return [given("a", A, "INT32"), given("b", B, "INT32")]


# --- inference


@pytest.mark.parametrize("datatype", IDENTITY_TYPES)
def test_every_datatype_round_trips(client, datatype):
    sent = values(datatype)
    answer = client.infer(f"identity_{datatype.lower()}", [given("x", sent, datatype)])
    np.testing.assert_array_equal(answer.as_numpy("y"), sent)
    output = answer.get_output("y")
    assert (output.datatype, list(output.shape)) == (datatype, list(sent.shape))


@pytest.mark.parametrize("datatype", IDENTITY_TYPES)
async def test_every_datatype_round_trips_asynchronously(aio_client, datatype):
    sent = values(datatype)
    answer = await aio_client.infer(f"identity_{datatype.lower()}", [given("x", sent, datatype)])
    np.testing.assert_array_equal(answer.as_numpy("y"), sent)


FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@pytest.mark.parametrize("datatype", FIELDS)
def test_every_datatype_round_trips_in_typed_contents(channel, datatype):
    """Messages have fields for numbers, though tritonclient always sends raw bytes."""
    sent = values(datatype)
    message = service_pb2.ModelInferRequest(model_name=f"identity_{datatype.lower()}")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=sent.shape)
    getattr(tensor.contents, FIELDS[datatype]).extend(sent.ravel().tolist())
    answer = triton.InferResult(service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=WAIT_S))
    np.testing.assert_array_equal(answer.as_numpy("y"), sent)


def test_id_and_parameters_come_back(client):
    sent = {"text": "yes", "number": 7, "is_true": True}
    answer = client.infer("add_sub", add_sub(), request_id="r7", parameters=sent).get_response()
    assert (answer.id, answer.model_name, answer.model_version) == ("r7", "add_sub", "1")
    assert answer.parameters["text"].string_param == "yes"
    assert answer.parameters["number"].int64_param == 7
    assert answer.parameters["is_true"].bool_param is True


def test_outputs_can_be_selected(client):
    every = client.infer("add_sub", add_sub())
    assert [output.name for output in every.get_response().outputs] == ["sum", "difference"]
    wanted = [triton.InferRequestedOutput("difference"), triton.InferRequestedOutput("sum")]
    turned = client.infer("add_sub", add_sub(), outputs=wanted)
    assert [output.name for output in turned.get_response().outputs] == ["difference", "sum"]
    np.testing.assert_array_equal(turned.as_numpy("difference"), A - B)
    one = client.infer("add_sub", add_sub(), outputs=[triton.InferRequestedOutput("sum")])
    assert [output.name for output in one.get_response().outputs] == ["sum"]
    np.testing.assert_array_equal(one.as_numpy("sum"), A + B)


def test_a_long_error_message_is_shortened(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="unknown output '水水") as caught:
        client.infer("add_sub", add_sub(), outputs=[triton.InferRequestedOutput("水" * 5000)])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert "the model has sum, difference" in caught.value.message()


def test_compression_is_supported(client):
    answer = client.infer("identity_fp32", floats(2, 50_000), compression_algorithm="gzip")
    np.testing.assert_array_equal(answer.as_numpy("y"), np.ones((2, 50_000), np.float32))
    with pytest.raises(InferenceServerException, match=r"deflate.*isn't supported"):  # by the native server
        client.infer("identity_fp32", floats(2, 50_000), compression_algorithm="deflate")


def test_ten_megabytes_round_trip(client):
    sent = np.random.default_rng(7).random((1, 2_500_000), np.float32)
    assert sent.nbytes == 10_000_000
    answer = client.infer("identity_fp32", [given("x", sent, "FP32")])
    np.testing.assert_array_equal(answer.as_numpy("y"), sent)


def test_callbacks_receive_answers(client):
    answers: queue.Queue[Any] = queue.Queue()
    for number in range(20):
        client.async_infer(
            "identity_fp32", floats(1, 2, value=number), lambda result, error: answers.put((result, error))
        )
    found = [answers.get(timeout=WAIT_S) for _ in range(20)]
    assert [error for _, error in found if error is not None] == []
    assert sorted(result.as_numpy("y")[0, 0] for result, _ in found) == list(range(20))


async def test_many_calls_run_at_once(aio_client):
    answers = await asyncio.gather(
        *(aio_client.infer("identity_fp32", floats(1, 3, value=number)) for number in range(100))
    )
    assert [answer.as_numpy("y")[0, 0] for answer in answers] == list(range(100))


def test_texts_are_embedded(client, minilm):
    for shape in ((2,), (2, 1)):
        texts = np.array([b"a photograph of a fig", "zażółć gęślą jaźń".encode()], dtype=object).reshape(shape)
        found = client.infer(minilm, [given("text", texts, "BYTES")]).as_numpy("embedding")
        assert found.shape == (2, 384)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-3)


def test_images_are_upscaled(client, photo):
    sent = np.array([[photo]], dtype=object)
    (image,) = client.infer("srcnn", [given("image", sent, "BYTES")]).as_numpy("image").ravel()
    assert image.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("model", "version", "inputs", "status", "message"),
    [
        ("nobody", "", floats(1, 2), "NOT_FOUND", "unknown model 'nobody'"),
        ("identity_fp32", "9", floats(1, 2), "NOT_FOUND", "no version '9'"),
        ("identity_int32", "", floats(1, 2), "INVALID_ARGUMENT", "FP32"),
        ("add_sub", "", floats(1, 2), "INVALID_ARGUMENT", "x"),
        ("identity_fp32", "", floats(1, 2, 3), "INVALID_ARGUMENT", "x"),
        ("identity_bytes", "", [given("x", np.array([[b"\xff"]], object), "BYTES")], "INVALID_ARGUMENT", "UTF-8"),
    ],
)
def test_errors_have_statuses_and_messages(client, model, version, inputs, status, message):
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer(model, inputs, version)
    assert caught.value.status() == f"StatusCode.{status}"


def test_too_many_rows_are_refused_with_a_hint(channel, client):
    with pytest.raises(InferenceServerException, match=r"limits\.max_rows") as caught:
        client.infer("identity_fp32", floats(5000, 1))
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    message = service_pb2.ModelInferRequest(model_name="identity_fp32")
    message.inputs.add(name="x", datatype="FP32", shape=[5000, 1])
    message.raw_input_contents.append(bytes(4 * 5000))
    with pytest.raises(grpc.RpcError) as refused:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=WAIT_S)
    trailing = dict(refused.value.trailing_metadata())
    assert int(trailing["retry-after"]) >= 1
    assert trailing["penstock-code"] == "request_too_large"


def ends_on_worker(server: ServerProcess, model: str) -> float:
    """Return the number of the model's jobs that were given up on a worker: cancelled, or past their deadline."""
    cancelled = server.metric("penstock_cancelled", model=model)
    return cancelled + server.metric("penstock_failures", model=model, code="deadline_exceeded")


def test_a_timeout_cancels_the_job(client, server, photo):
    before = ends_on_worker(server, "srcnn")
    images = np.array([[photo]] * 8, dtype=object)
    with pytest.raises(InferenceServerException) as caught:
        client.infer("srcnn", [given("image", images, "BYTES")], client_timeout=0.2)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    eventually(lambda: ends_on_worker(server, "srcnn") > before, "the worker gave the job up")


def test_tritons_timeout_parameter_is_applied(client, photo):
    images = np.array([[photo]] * 8, dtype=object)
    with pytest.raises(InferenceServerException, match="deadline") as caught:
        client.infer("srcnn", [given("image", images, "BYTES")], timeout=100_000)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"


# --- streams


class Stream:
    """Answers and errors that a stream's callback received."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self.heard: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self.client = client
        client.start_stream(lambda result, error: self.heard.put((result, error)))

    def next(self) -> tuple[Any, InferenceServerException | None]:
        return self.heard.get(timeout=WAIT_S)


@pytest.fixture
def stream(client: triton.InferenceServerClient) -> Iterator[Stream]:
    opened = Stream(client)
    yield opened
    client.stop_stream()


def test_a_stream_answers_in_order(client, stream):
    # Large and small requests take different times; the answers keep the order nevertheless.
    widths = [50_000 if number % 3 == 0 else 2 for number in range(60)]
    for number, width in enumerate(widths):
        client.async_stream_infer("identity_fp32", floats(1, width, value=number), request_id=str(number))
    for number, width in enumerate(widths):
        result, error = stream.next()
        assert error is None
        assert result.get_response().id == str(number)
        np.testing.assert_array_equal(result.as_numpy("y"), np.full((1, width), number, np.float32))


def test_errors_do_not_end_a_stream(client, stream):
    client.async_stream_infer("identity_fp32", floats(1, 2), request_id="good")
    client.async_stream_infer("nobody", floats(1, 2), request_id="unknown")
    client.async_stream_infer("identity_int8", floats(1, 2), request_id="wrong")
    client.async_stream_infer("identity_fp32", floats(5000, 1), request_id="large")
    client.async_stream_infer("add_sub", add_sub(), request_id="other model")
    heard = [stream.next() for _ in range(5)]
    errors = [str(error) if error else "" for _, error in heard]
    assert errors[0] == errors[4] == ""
    assert "unknown model 'nobody'" in errors[1]
    assert "FP32" in errors[2]
    assert "max_rows" in errors[3]
    np.testing.assert_array_equal(heard[4][0].as_numpy("sum"), A + B)


def test_a_stream_can_be_cancelled(client, server, photo):
    before = ends_on_worker(server, "srcnn")
    stream = Stream(client)
    image = np.array([[photo]], dtype=object)
    for _ in range(20):
        client.async_stream_infer("srcnn", [given("image", image, "BYTES")])
    _, error = stream.next()
    assert error is None
    client.stop_stream(cancel_requests=True)
    eventually(lambda: ends_on_worker(server, "srcnn") > before, "the worker gave the jobs up")
    np.testing.assert_array_equal(client.infer("add_sub", add_sub()).as_numpy("sum"), A + B)


async def test_an_asynchronous_stream_answers(aio_client):
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(30):
            model = "nobody" if number == 10 else "identity_fp32"
            yield {"model_name": model, "inputs": floats(1, 2, value=number), "request_id": str(number)}

    number = 0
    async for result, error in aio_client.stream_infer(requests()):
        if number == 10:
            assert "unknown model" in str(error)
        else:
            assert error is None
            assert result.get_response().id == str(number)
            assert result.as_numpy("y")[0, 0] == number
        number += 1
    assert number == 30


# --- metadata


def test_health_and_metadata_are_returned(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("identity_fp32")
    assert client.is_model_ready("identity_fp32", "1")
    found = client.get_server_metadata()
    assert found.name == "penstock"
    assert {"binary_tensor_data", "statistics", "model_repository"} <= set(found.extensions)
    metadata = client.get_model_metadata("identity_fp32", "1")
    assert (metadata.name, list(metadata.versions)) == ("identity_fp32", ["1"])
    assert [(i.name, i.datatype, list(i.shape)) for i in metadata.inputs] == [("x", "FP32", [-1, -1])]
    assert [(o.name, o.datatype, list(o.shape)) for o in metadata.outputs] == [("y", "FP32", [-1, -1])]
    with pytest.raises(InferenceServerException, match="nobody") as caught:
        client.get_model_metadata("nobody")
    assert caught.value.status() == "StatusCode.NOT_FOUND"


def test_the_config_is_returned(client):
    config = client.get_model_config("add_sub").config
    assert (config.name, config.backend) == ("add_sub", "onnxruntime")
    assert config.max_batch_size == 32
    assert [(i.name, list(i.dims)) for i in config.input] == [("a", [4]), ("b", [4])]
    assert [(o.name, list(o.dims)) for o in config.output] == [("sum", [4]), ("difference", [4])]
    assert config.instance_group[0].count >= 1
    as_json = client.get_model_config("identity_int64", as_json=True)
    assert as_json["config"]["input"][0]["data_type"] == "TYPE_INT64"


async def test_metadata_is_returned_asynchronously(aio_client):
    assert await aio_client.is_server_live()
    assert await aio_client.is_server_ready()
    assert await aio_client.is_model_ready("add_sub")
    assert (await aio_client.get_server_metadata()).name == "penstock"
    assert (await aio_client.get_model_metadata("add_sub")).name == "add_sub"
    assert (await aio_client.get_model_config("add_sub")).config.name == "add_sub"
    assert (await aio_client.get_inference_statistics("add_sub")).model_stats[0].name == "add_sub"
    assert "add_sub" in {entry.name for entry in (await aio_client.get_model_repository_index()).models}
    with pytest.raises(InferenceServerException, match="unknown model"):
        await aio_client.get_model_metadata("nobody")


def test_grpc_health_is_reported(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watched = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=WAIT_S)
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
    watched.cancel()


def test_reflection_lists_the_services(channel):
    reflected = ProtoReflectionDescriptorDatabase(channel)
    assert SERVICE in reflected.get_services()
    file = reflected.FindFileContainingSymbol(SERVICE)
    (service,) = file.service
    assert {"ModelInfer", "ModelStreamInfer", "ModelStatistics"} <= {method.name for method in service.method}


# --- statistics


def statistics(client: triton.InferenceServerClient, model: str) -> Any:
    (found,) = client.get_inference_statistics(model, "1").model_stats
    return found


def test_statistics_add_up(client):
    model, requests, rows = "identity_fp64", 64, 2
    before = statistics(client, model)
    array = np.ones((rows, 1000))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: client.infer(model, [given("x", array, "FP64")]), range(requests)))
    found = statistics(client, model)
    assert found.inference_count - before.inference_count == requests * rows
    executions = found.execution_count - before.execution_count
    assert 1 <= executions <= requests
    assert found.last_inference > before.last_inference
    stats, earlier = found.inference_stats, before.inference_stats
    for phase in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert getattr(stats, phase).count - getattr(earlier, phase).count == requests, phase
    for phase in ("success", "queue", "compute_infer"):
        assert getattr(stats, phase).ns > getattr(earlier, phase).ns, phase
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    assert sum(getattr(stats, phase).ns for phase in parts) <= stats.success.ns
    counted = {batch.batch_size: batch.compute_infer.count for batch in found.batch_stats}
    assert sum(counted.values()) == found.execution_count
    assert sum(size * count for size, count in counted.items()) == found.inference_count
    assert all(batch.compute_infer.ns > 0 for batch in found.batch_stats)


def test_failures_are_counted_apart(client):
    model = "identity_uint32"
    before = statistics(client, model)
    with pytest.raises(InferenceServerException):
        client.infer(model, floats(1, 2))
    found = statistics(client, model)
    assert found.inference_stats.fail.count == before.inference_stats.fail.count + 1
    assert found.inference_stats.success.count == before.inference_stats.success.count
    assert found.inference_count == before.inference_count


def test_statistics_of_all_models_are_returned(client):
    assert {entry.name for entry in client.get_inference_statistics().model_stats} >= {"add_sub", "identity_int8"}
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.get_inference_statistics("nobody")


# --- the repository


def test_models_are_loaded_and_unloaded(client):
    model = "identity_uint64"
    sent = [given("x", np.ones((1, 1), np.uint64), "UINT64")]

    def state() -> str:
        return str({entry.name: entry.state for entry in client.get_model_repository_index().models}[model])

    assert state() == "READY"
    client.unload_model(model)
    assert state() == "UNAVAILABLE"
    assert not client.is_model_ready(model)
    with pytest.raises(InferenceServerException, match=f"'{model}' version 1 is unloaded") as caught:
        client.infer(model, sent)
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    client.load_model(model)
    assert state() == "READY"
    assert client.infer(model, sent).as_numpy("y")[0, 0] == 1
    client.load_model(model)  # loaded again, while it serves
    assert client.infer(model, sent).as_numpy("y")[0, 0] == 1
    for change in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match="nobody") as caught:
            change("nobody")
        assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match="takes no parameters"):
        client.load_model(model, config="{}")


async def test_requests_during_a_reload_are_served_or_refused_clearly(aio_client):
    """Each request is served, or refused because the model is away."""
    model = "identity_int16"
    sent = [given("x", np.full((1, 2), 7, np.int16), "INT16")]
    failures: list[InferenceServerException] = []
    served = itertools.count()
    is_over = asyncio.Event()

    async def ask_on() -> None:
        while not is_over.is_set():
            try:
                answer = await aio_client.infer(model, sent)
                assert answer.as_numpy("y").tolist() == [[7, 7]]
                next(served)
            except InferenceServerException as error:
                failures.append(error)
                await asyncio.sleep(0.01)

    askers = [asyncio.create_task(ask_on()) for _ in range(8)]
    for _ in range(3):
        await aio_client.unload_model(model)
        await aio_client.load_model(model)
        await aio_client.load_model(model)
    is_over.set()
    await asyncio.gather(*askers)
    assert next(served) > 0
    assert {error.status() for error in failures} <= {"StatusCode.UNAVAILABLE"}
    assert all(f"'{model}'" in error.message() for error in failures)
    assert (await aio_client.infer(model, sent)).as_numpy("y").tolist() == [[7, 7]]
