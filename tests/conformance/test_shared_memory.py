"""tritonclient's unmodified shared memory modules, over gRPC and HTTP."""

import contextlib
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from benchmarks.server import ServerProcess
from tests.servers import write_identity

A = np.array([[1, 2, 3, 4]], np.int32)
B = np.array([[10, 20, 30, 40]], np.int32)
PROTOCOLS = ("grpc", "http")
Make = Callable[..., Any]


@pytest.fixture
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Any]:
    """Yield a client for tests that are parametrized with `client` as one of PROTOCOLS."""
    with connect(request.param, server) as opened:
        yield opened
        opened.unregister_system_shared_memory()


@pytest.fixture
def make() -> Iterator[Make]:
    """Yield a function that makes regions; they are destroyed when the test ends."""
    made = []

    def make_region(byte_size: int, *arrays: np.ndarray, key: str = "") -> Any:
        key = key or f"/test-{secrets.token_hex(6)}"
        made.append(shared_memory.create_shared_memory_region(key, key, byte_size))
        shared_memory.set_shared_memory_region(made[-1], arrays)
        return made[-1]

    yield make_region
    for handle in made:
        shared_memory.destroy_shared_memory_region(handle)


both = pytest.mark.parametrize("client", PROTOCOLS, indirect=True)


def connect(protocol: str, server: ServerProcess) -> Any:
    if protocol == "grpc":
        return triton_grpc.InferenceServerClient(server.grpc)
    return triton_http.InferenceServerClient(server.http_url.removeprefix("http://"))


def module(client: Any) -> Any:
    return triton_grpc if isinstance(client, triton_grpc.InferenceServerClient) else triton_http


def register(client: Any, name: str, handle: Any, byte_size: int, offset: int = 0) -> None:
    client.register_system_shared_memory(name, handle._shm_key, byte_size, offset=offset)


def shared_input(client: Any, name: str, shape: list[int], datatype: str, *place: Any) -> Any:
    made = module(client).InferInput(name, shape, datatype)
    made.set_shared_memory(*place)
    return made


def shared_output(client: Any, name: str, *place: Any) -> Any:
    made = module(client).InferRequestedOutput(name)
    made.set_shared_memory(*place)
    return made


def regions(client: Any, name: str = "") -> dict[str, tuple[str, int, int]]:
    status = client.get_system_shared_memory_status(name)
    if isinstance(status, list):
        return {region["name"]: (region["key"], region["offset"], region["byte_size"]) for region in status}
    return {region.name: (region.key, region.offset, region.byte_size) for region in status.regions.values()}


def sent_size(output: Any) -> int:
    """Return the size of the region's output according to the answer."""
    if isinstance(output, dict):
        return int(output["parameters"]["shared_memory_byte_size"])
    return int(output.parameters["shared_memory_byte_size"].int64_param)


# --- regions


@both
def test_regions_are_registered_and_unregistered(client, make):
    handle = make(64)
    register(client, "mine", handle, 64)
    register(client, "part", handle, 16, 48)
    assert regions(client) == {"mine": (handle._shm_key, 0, 64), "part": (handle._shm_key, 48, 16)}
    assert regions(client, "part") == {"part": (handle._shm_key, 48, 16)}
    register(client, "mine", handle, 64)
    client.unregister_system_shared_memory("part")
    assert set(regions(client)) == {"mine"}
    client.unregister_system_shared_memory()
    assert regions(client) == {}
    client.unregister_system_shared_memory("part")


@both
def test_invalid_registrations_are_refused(client, make):
    handle = make(64)
    register(client, "mine", handle, 32)
    size = handle._mpsm_handle.size
    for name, key, byte_size, offset, message in [
        ("mine", handle._shm_key, 64, 0, "unregister it first"),
        ("other", handle._shm_key, size + 1, 0, "has"),
        ("other", handle._shm_key, 1, size, "has"),
        ("other", "/nobody-made-this", 1, 0, "cannot be opened"),
        ("other", "/../etc/passwd", 1, 0, "invalid key"),
    ]:
        with pytest.raises(InferenceServerException, match=message) as caught:
            client.register_system_shared_memory(name, key, byte_size, offset)
        assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    with pytest.raises(InferenceServerException, match="register it first"):
        client.get_system_shared_memory_status("nobody")
    assert set(regions(client)) == {"mine"}


@both
def test_cuda_regions_are_refused_clearly(client):
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("mine")
    status = client.get_cuda_shared_memory_status()
    assert len(status if isinstance(status, list) else status.regions) == 0
    with pytest.raises(InferenceServerException, match="use system shared memory"):
        client.register_cuda_shared_memory("mine", "aGFuZGxl", 0, 64)


@both
def test_the_server_announces_the_extension(client):
    found = client.get_server_metadata()
    assert "system_shared_memory" in (found["extensions"] if isinstance(found, dict) else found.extensions)


# --- inference


@both
def test_all_tensors_can_be_in_one_region(client, make):
    handle = make(64, A, B)
    register(client, "r", handle, 64)
    inputs = [
        shared_input(client, "a", [1, 4], "INT32", "r", 16),
        shared_input(client, "b", [1, 4], "INT32", "r", 16, 16),
    ]
    outputs = [shared_output(client, "sum", "r", 16, 32), shared_output(client, "difference", "r", 16, 48)]
    answer = client.infer("add_sub", inputs, outputs=outputs)
    for name, offset, expected in (("sum", 32, A + B), ("difference", 48, A - B)):
        found = shared_memory.get_contents_as_numpy(handle, np.int32, [1, 4], offset)
        np.testing.assert_array_equal(found, expected)
        assert sent_size(answer.get_output(name)) == 16


@both
def test_shared_and_sent_tensors_can_be_in_one_request(client, make):
    handle = make(32, A)
    register(client, "r", handle, 32)
    sent = module(client).InferInput("b", [1, 4], "INT32")
    sent.set_data_from_numpy(B)
    given = shared_input(client, "a", [1, 4], "INT32", "r", 16)
    for inputs in ([given, sent], [sent, given]):
        outputs = [shared_output(client, "difference", "r", 16, 16), module(client).InferRequestedOutput("sum")]
        answer = client.infer("add_sub", inputs, outputs=outputs)
        np.testing.assert_array_equal(answer.as_numpy("sum"), A + B)
        found = shared_memory.get_contents_as_numpy(handle, np.int32, [1, 4], 16)
        np.testing.assert_array_equal(found, A - B)
        found[:] = 0


@both
def test_texts_in_memory_are_embedded(client, make, minilm):
    texts = np.array([b"a photograph of a fig", "zażółć gęślą jaźń".encode()], dtype=object)
    packed = serialize_byte_tensor(texts)
    size = len(packed.item())
    source, sink = make(size, packed), make(2 * 384 * 4)
    register(client, "texts", source, size)
    register(client, "vectors", sink, 2 * 384 * 4)
    given = shared_input(client, "text", [2], "BYTES", "texts", size)
    wanted = shared_output(client, "embedding", "vectors", 2 * 384 * 4)
    client.infer(minilm, [given], outputs=[wanted])
    found = shared_memory.get_contents_as_numpy(sink, np.float32, [2, 384])
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-3)


@both
def test_images_in_memory_are_upscaled(client, make, photo):
    packed = serialize_byte_tensor(np.array([photo], dtype=object))
    size = len(packed.item())
    source, sink = make(size, packed), make(8_000_000)
    register(client, "photo", source, size)
    register(client, "large", sink, 8_000_000)
    given = shared_input(client, "image", [1], "BYTES", "photo", size)
    answer = client.infer("srcnn", [given], outputs=[shared_output(client, "image", "large", 8_000_000)])
    (image,) = shared_memory.get_contents_as_numpy(sink, np.object_, [1])
    assert image.startswith(b"\x89PNG")
    assert sent_size(answer.get_output("image")) == len(image) + 4
    with pytest.raises(InferenceServerException, match=f"set it to {len(image) + 4}"):
        client.infer("srcnn", [given], outputs=[shared_output(client, "image", "large", 1000)])


@both
def test_invalid_requests_are_refused(client, make):
    handle = make(32, A, B)
    register(client, "r", handle, 32)
    b = shared_input(client, "b", [1, 4], "INT32", "r", 16, 16)
    for place, message in [
        (("nobody", 16), "register it first"),
        (("r", 33), "which has 32"),
        (("r", 16, 17), "which has 32"),
        (("r", 12), "12 bytes"),
    ]:
        with pytest.raises(InferenceServerException, match=message) as caught:
            client.infer("add_sub", [shared_input(client, "a", [1, 4], "INT32", *place), b])
        assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    # Refused requests do not affect the next one.
    answer = client.infer("add_sub", [shared_input(client, "a", [1, 4], "INT32", "r", 16), b])
    np.testing.assert_array_equal(answer.as_numpy("sum"), A + B)


def test_shared_bytes_count_against_the_limit(server, make):
    size = 65 * 1024 * 1024
    handle = make(size)
    with connect("grpc", server) as client:
        register(client, "large", handle, size)
        given = shared_input(client, "x", [1, size], "INT8", "large", size)
        with pytest.raises(InferenceServerException, match=r"limits\.max_message_bytes"):
            client.infer("identity_int8", [given])
        client.unregister_system_shared_memory()


def test_a_stream_accepts_shared_tensors(server, make):
    handle = make(8 * 100)
    answers: queue.Queue[Any] = queue.Queue()
    with connect("grpc", server) as client:
        register(client, "r", handle, 800)
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(100):
            shared_memory.set_shared_memory_region(handle, [np.array([[number]], np.float32)], 8 * number)
            client.async_stream_infer(
                "identity_fp32",
                [shared_input(client, "x", [1, 1], "FP32", "r", 4, 8 * number)],
                outputs=[shared_output(client, "y", "r", 4, 8 * number + 4)],
            )
        errors = [answers.get(timeout=30)[1] for _ in range(100)]
        client.stop_stream()
        client.unregister_system_shared_memory()
    assert errors == [None] * 100
    found = shared_memory.get_contents_as_numpy(handle, np.float32, [100, 2])
    np.testing.assert_array_equal(found[:, 0], np.arange(100))
    np.testing.assert_array_equal(found[:, 1], np.arange(100))


def test_every_gateway_knows_every_region(make, tmp_path: Path):
    models = tmp_path / "models"
    models.mkdir()
    write_identity(models, "identity", "FP32")
    handle = make(16, np.array([[1.5, 2.5]], np.float32))
    with ServerProcess(models, tmp_path, "--gateways", "2", "--allow-shared-memory") as server:
        with connect("http", server) as client:
            register(client, "r", handle, 16)
            given = shared_input(client, "x", [1, 2], "FP32", "r", 8)._get_tensor()
        # Each new connection goes to one of the gateways.
        for _ in range(20):
            url = f"{server.http_url}/v2/models/identity/infer"
            answer = httpx.post(url, json={"inputs": [given]}, timeout=30)
            assert answer.json()["outputs"][0]["data"] == [1.5, 2.5]
        with connect("grpc", server) as client:
            assert set(regions(client)) == {"r"}
            client.unregister_system_shared_memory("r")
        for _ in range(20):
            answer = httpx.post(url, json={"inputs": [given]}, timeout=30)
            assert (answer.status_code, "register it first" in answer.json()["error"]) == (400, True)


def test_a_client_that_truncates_its_object_affects_only_itself(server, make):
    size = 8_000_000
    handle = make(size)
    file = Path("/dev/shm") / handle._shm_key.removeprefix("/")
    is_over = threading.Event()

    def cut_and_mend() -> None:
        while not is_over.is_set():
            os.truncate(file, 0)
            os.truncate(file, size)

    pid = server.pid
    cutter = threading.Thread(target=cut_and_mend)
    with connect("grpc", server) as client:
        register(client, "r", handle, size)
        given = shared_input(client, "x", [1, size // 4], "FP32", "r", size)
        cutter.start()
        try:
            for _ in range(30):
                with contextlib.suppress(InferenceServerException):
                    client.infer("identity_fp32", [given], outputs=[shared_output(client, "y", "r", size)])
        finally:
            is_over.set()
            cutter.join()
        client.infer("identity_fp32", [given], outputs=[shared_output(client, "y", "r", size)])
        client.unregister_system_shared_memory()
    assert (server.process.poll(), server.pid) == (None, pid)
