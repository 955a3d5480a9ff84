"""Shared memory: registering regions, reading and writing them, and objects that clients change meanwhile."""

import gc
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import Forbidden, InvalidRequest, InvalidTensor, Refused, RequestTooLarge
from penstock.core.requests import InferResponse, Timing
from penstock.core.tensors import Tensor, from_array
from penstock.gateway.oip.grpc_codec import decode_request, encode_response, find_targets
from penstock.gateway.oip.rest_codec import decode_infer, encode_infer
from penstock.gateway.shared_memory.region import OBJECTS_FOLDER as FOLDER
from penstock.gateway.shared_memory.region import RegionPlace
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.pb.inference import grpc_service_pb2 as pb

Make = Callable[..., str]
NOTHING = memoryview(b"")
OBJECTS = Path(FOLDER)
FLOATS = np.array([[1.5, -2.0]], np.float32)


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that creates objects as clients do, and returns their keys."""
    made: list[Path] = []

    def make_object(data: bytes = bytes(64), key: str = "") -> str:
        key = key or f"/test-{secrets.token_hex(8)}"
        made.append(OBJECTS / key.removeprefix("/"))
        made[-1].write_bytes(data)
        return key

    yield make_object
    for file in made:
        file.unlink(missing_ok=True)


@pytest.fixture
def memory(tmp_path: Path) -> SharedMemory:
    return SharedMemory(tmp_path / "regions", max_request_bytes=1000)


def content(key: str) -> bytes:
    return (OBJECTS / key.removeprefix("/")).read_bytes()


def read(memory: SharedMemory, region: str, offset: int, size: int) -> bytes:
    return memory.read("x", RegionPlace(region, offset, size), 0)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- registering


def test_status_lists_registered_regions(memory, make):
    one, two = make(), make()
    memory.register("one", one, 0, 64)
    memory.register("zażółć / two", two.removeprefix("/"), 16, 8)
    assert [(r.name, r.key, r.offset, r.byte_size) for r in memory.status()] == [
        ("one", one, 0, 64),
        ("zażółć / two", two.removeprefix("/"), 16, 8),
    ]
    assert [r.name for r in memory.status("one")] == ["one"]
    with pytest.raises(InvalidRequest, match="no shared memory region 'three'"):
        memory.status("three")


def test_unregister_removes_one_or_all_regions(memory, make):
    for name in ("a", "b", "c"):
        memory.register(name, make(), 0, 1)
    memory.unregister("b")
    memory.unregister("b")
    assert [r.name for r in memory.status()] == ["a", "c"]
    memory.unregister()
    assert memory.status() == []
    with pytest.raises(InvalidRequest, match="register it first"):
        read(memory, "a", 0, 1)


def test_a_name_cannot_be_registered_for_another_place(memory, make):
    key = make()
    memory.register("r", key, 0, 8)
    memory.register("r", key, 0, 8)
    for changed in ((make(), 0, 8), (key, 1, 8), (key, 0, 9)):
        with pytest.raises(InvalidRequest, match="unregister it first"):
            memory.register("r", *changed)
    assert [(r.key, r.offset, r.byte_size) for r in memory.status()] == [(key, 0, 8)]


def test_gateways_of_one_server_see_the_same_regions(memory, make, tmp_path):
    other = SharedMemory(tmp_path / "regions")
    key = make(b"0123456789")
    memory.register("r", key, 2, 8)
    assert read(other, "r", 1, 3) == b"345"
    with pytest.raises(InvalidRequest, match="unregister it first"):
        other.register("r", key, 0, 8)
    other.unregister("r")
    with pytest.raises(InvalidRequest, match="register it first"):
        read(memory, "r", 1, 3)


def test_the_number_of_regions_is_limited(make, tmp_path):
    memory = SharedMemory(tmp_path, max_regions=2)
    key = make()
    memory.register("a", key, 0, 1)
    memory.register("b", key, 0, 1)
    with pytest.raises(Refused, match="unregister some"):
        memory.register("c", key, 0, 1)
    memory.register("b", key, 0, 1)  # already registered
    memory.unregister("a")
    memory.register("c", key, 0, 1)


@pytest.mark.parametrize(
    ("offset", "byte_size"), [(0, 65), (64, 1), (1, 64), (0, 0), (-1, 4), (2**63, 1), (1, 2**63), (0, -1)]
)
def test_a_region_must_lie_within_its_object(memory, make, offset, byte_size):
    with pytest.raises(InvalidRequest):
        memory.register("r", make(), offset, byte_size)
    assert memory.status() == []


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        ".",
        "..",
        "/..",
        "../etc/passwd",
        "/../etc/passwd",
        "/a/../../etc/passwd",
        "//etc/passwd",
        "/etc/passwd",
        "a/b",
        "a\0b",
        "x" * 300,
        "sem.mine",
        "/sem.mine",
        "/nobody-made-this",
    ],
)
def test_hostile_keys_are_refused(memory, key):
    with pytest.raises(InvalidRequest):
        memory.register("r", key, 0, 1)
    assert memory.status() == []


def test_only_plain_objects_are_opened(memory, make, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    link, pipe, folder = (OBJECTS / f"test-{secrets.token_hex(8)}" for _ in range(3))
    link.symlink_to(secret)
    os.mkfifo(pipe)
    folder.mkdir()
    try:
        for hostile in (link, pipe, folder):
            with pytest.raises(InvalidRequest, match=hostile.name):
                memory.register("r", f"/{hostile.name}", 0, 1)
    finally:
        link.unlink()
        pipe.unlink()
        folder.rmdir()


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_the_length_of_names_is_limited(memory, make, name):
    with pytest.raises(InvalidRequest, match="1 to 256 characters"):
        memory.register(name, make(), 0, 1)


# --- bytes


def test_reads_and_writes_stay_within_the_region(memory, make):
    key = make(b"0123456789")
    memory.register("r", key, 2, 6)
    assert read(memory, "r", 0, 6) == b"234567"
    assert read(memory, "r", 5, 1) == b"7"
    assert read(memory, "r", 6, 0) == b""
    memory.open_target("y", RegionPlace("r", 1, 3)).write(Tensor("y", "UINT8", (2,), b"ab"))
    assert content(key) == b"012ab56789"
    for offset, size in ((0, 7), (6, 1), (2**63, 1)):
        with pytest.raises(InvalidTensor, match="region 'r', which has 6"):
            read(memory, "r", offset, size)
        with pytest.raises(InvalidTensor, match="region 'r', which has 6"):
            memory.open_target("y", RegionPlace("r", offset, size))


def test_the_bytes_of_a_request_are_limited(memory, make):
    memory.register("r", make(bytes(2000)), 0, 2000)
    assert len(memory.read("x", RegionPlace("r", 0, 900), 100)) == 900
    for size, taken in ((1001, 0), (901, 100)):
        with pytest.raises(RequestTooLarge, match=r"limits\.max_message_bytes"):
            memory.read("x", RegionPlace("r", 0, size), taken)


def test_a_truncated_object_fails_only_its_request(memory, make):
    key = make(bytes(8192))
    memory.register("r", key, 0, 8192)
    target = memory.open_target("y", RegionPlace("r", 4096, 4096))
    os.truncate(OBJECTS / key.removeprefix("/"), 4096)
    with pytest.raises(InvalidTensor, match="smaller than it was"):
        read(memory, "r", 4000, 200)
    with pytest.raises(InvalidTensor, match="smaller than it was"):
        target.write(Tensor("y", "UINT8", (8,), bytes(8)))
    assert len(content(key)) == 4096
    assert read(memory, "r", 0, 96) == bytes(96)


def test_another_object_with_the_same_key_is_refused(memory, make):
    key = make(b"first")
    memory.register("r", key, 0, 5)
    (OBJECTS / key.removeprefix("/")).unlink()
    with pytest.raises(InvalidRequest, match="cannot be opened"):
        read(memory, "r", 0, 5)
    make(b"again", key)
    with pytest.raises(InvalidRequest, match="register it again"):
        read(memory, "r", 0, 5)
    memory.register("r", key, 0, 5)
    assert read(memory, "r", 0, 5) == b"again"


def test_a_running_request_keeps_its_region(memory, make):
    key = make(bytes(4))
    memory.register("r", key, 0, 4)
    target = memory.open_target("y", RegionPlace("r", 0, 4))
    client = (OBJECTS / key.removeprefix("/")).open("rb")
    memory.unregister()
    (OBJECTS / key.removeprefix("/")).unlink()
    target.write(Tensor("y", "UINT8", (4,), b"done"))
    with client:
        assert client.read() == b"done"


def test_a_name_registered_again_uses_the_new_region(memory, make):
    old, new = make(b"old"), make(b"new")
    memory.register("r", old, 0, 3)
    target = memory.open_target("y", RegionPlace("r", 0, 3))
    memory.unregister("r")
    memory.register("r", new, 0, 3)
    assert read(memory, "r", 0, 3) == b"new"
    target.write(Tensor("y", "UINT8", (3,), b"OLD"))
    assert (content(old), content(new)) == (b"OLD", b"new")


def test_no_descriptor_stays_open(memory, make):
    memory.register("r", make(), 0, 64)
    gc.collect()
    before = open_files()
    targets = [memory.open_target("y", RegionPlace("r", 0, 4)) for _ in range(50)]
    read(memory, "r", 0, 4)
    assert open_files() == before + 1
    targets.clear()
    assert open_files() == before


# --- requests over gRPC


def shared(tensor: Any, region: str, byte_size: int, offset: int = 0) -> None:
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = byte_size
    if offset:
        tensor.parameters["shared_memory_offset"].int64_param = offset


def test_grpc_inputs_from_memory_between_raw_ones(memory, make):
    memory.register("r", make(b"...." + FLOATS.tobytes()), 0, 12)
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="a", datatype="FP32", shape=[1])
    shared(message.inputs.add(name="b", datatype="FP32", shape=[1, 2]), "r", 8, 4)
    message.inputs.add(name="c", datatype="INT8", shape=[1])
    message.raw_input_contents.extend([b"aaaa", b"c"])
    request = decode_request(message, "grpc", memory)
    assert [(t.name, t.shape, bytes(t.data)) for t in request.inputs] == [
        ("a", (1,), b"aaaa"),
        ("b", (1, 2), FLOATS.tobytes()),
        ("c", (1,), b"c"),
    ]
    assert request.size_bytes == 13
    message.raw_input_contents.append(b"d")
    message.raw_input_contents.append(b"e")
    with pytest.raises(InvalidRequest, match="4 entries for 2 inputs"):
        decode_request(message, "grpc", memory)
    del message.raw_input_contents[:]
    message.inputs[0].contents.fp32_contents.append(7)
    message.inputs[2].contents.int_contents.append(3)
    request = decode_request(message, "grpc", memory)
    assert [bytes(t.data) for t in request.inputs] == [np.float32(7).tobytes(), FLOATS.tobytes(), b"\3"]


def test_grpc_inputs_can_all_be_in_shared_memory(memory, make):
    memory.register("r", make(FLOATS.tobytes()), 0, 8)
    message = pb.ModelInferRequest(model_name="m")
    shared(message.inputs.add(name="x", datatype="FP32", shape=[1, 2]), "r", 8)
    assert bytes(decode_request(message, "grpc", memory).inputs[0].data) == FLOATS.tobytes()
    with pytest.raises(InvalidRequest, match="does not support shared memory"):
        decode_request(message, "grpc")


@pytest.mark.parametrize("missing", ["shared_memory_byte_size", "shared_memory_region"])
def test_incomplete_grpc_parameters_are_refused(memory, make, missing):
    memory.register("r", make(), 0, 8)
    message = pb.ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    shared(tensor, "r", 8)
    if missing == "shared_memory_region":
        tensor.parameters[missing].int64_param = 1
    else:
        del tensor.parameters[missing]
    with pytest.raises(InvalidTensor, match=missing):
        decode_request(message, "grpc", memory)


def test_grpc_outputs_are_written_to_shared_memory(memory, make):
    key = make(bytes(16))
    memory.register("r", key, 0, 16)
    message = pb.ModelInferRequest(model_name="m")
    shared(message.outputs.add(name="y"), "r", 10, 4)
    message.outputs.add(name="z")
    targets = find_targets(message, memory)
    sent = InferResponse("m", "1", "", [from_array("y", FLOATS), from_array("z", FLOATS)], Timing())
    answer = encode_response(sent, message, targets)
    assert content(key) == bytes(4) + FLOATS.tobytes() + bytes(4)
    parameters = answer.outputs[0].parameters
    assert parameters["shared_memory_region"].string_param == "r"
    assert parameters["shared_memory_byte_size"].int64_param == 8
    assert parameters["shared_memory_offset"].int64_param == 4
    assert list(answer.raw_output_contents) == [b"", FLOATS.tobytes()]
    assert list(answer.outputs[1].parameters) == []
    del message.outputs[0]
    assert not find_targets(message, memory)


def test_the_error_of_a_too_large_output_names_the_required_size(memory, make):
    memory.register("r", make(), 0, 64)
    message = pb.ModelInferRequest(model_name="m")
    shared(message.outputs.add(name="y"), "r", 7)
    sent = InferResponse("m", "1", "", [from_array("y", FLOATS)], Timing())
    with pytest.raises(InvalidTensor, match=r"'y' has 8 bytes, but shared_memory_byte_size .* is 7: set it to 8"):
        encode_response(sent, message, find_targets(message, memory))


# --- requests over REST


def place(region: str, byte_size: object, offset: object = 0) -> dict[str, object]:
    return {
        "shared_memory_region": region,
        "shared_memory_byte_size": byte_size,
        "shared_memory_offset": offset,
    }


def tensor(name: str, **changed: object) -> dict[str, object]:
    return {"name": name, "datatype": "FP32", "shape": [1, 2], **changed}


def encoded(**message: object) -> bytes:
    return json.dumps(message).encode()


def test_rest_inputs_from_memory_beside_json_and_binary(memory, make):
    memory.register("r", make(b"...." + FLOATS.tobytes()), 0, 12)
    inputs = [
        tensor("a", parameters={"binary_data_size": 8}),
        tensor("b", parameters=place("r", 8, 4)),
        tensor("c", data=[3, 4]),
        tensor("d", parameters={"binary_data_size": 8}),
    ]
    request, _ = decode_infer(encoded(inputs=inputs), memoryview(b"aaaaaaaadddddddd"), memory)
    found = [bytes(given.data) for given in request.inputs]
    assert found == [b"a" * 8, FLOATS.tobytes(), np.array([3, 4], np.float32).tobytes(), b"d" * 8]
    assert request.size_bytes == 32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parameters": place("r", 8), "data": [1, 2]}, "more than one"),
        ({"parameters": {**place("r", 8), "binary_data_size": 8}}, "more than one"),
        ({"parameters": {"shared_memory_region": "r"}}, "shared_memory_byte_size"),
        ({"parameters": place("r", "8")}, "shared_memory_byte_size"),
        ({"parameters": place("r", 8, -1)}, "shared_memory_offset"),
        ({"parameters": place("r", 8, True)}, "shared_memory_offset"),
        ({"parameters": place("", 8)}, "shared_memory_region"),
        ({"parameters": place("nobody", 8)}, "register it first"),
        ({"parameters": place("r", 4)}, "4 bytes of data"),
        ({"parameters": place("r", 65)}, "which has 64"),
    ],
)
def test_invalid_rest_inputs_are_refused(memory, make, changed, message):
    memory.register("r", make(), 0, 64)
    with pytest.raises(InvalidRequest, match=message):
        decode_infer(encoded(inputs=[tensor("x", **changed)]), NOTHING, memory)


def test_rest_outputs_are_written_to_shared_memory(memory, make):
    key = make(bytes(16))
    memory.register("r", key, 0, 16)
    outputs = [
        {"name": "y", "parameters": {**place("r", 16), "binary_data": False}},
        {"name": "z", "parameters": {"binary_data": True}},
    ]
    request, form = decode_infer(encoded(inputs=[], outputs=outputs), NOTHING, memory)
    assert request.outputs == ["y", "z"]
    sent = InferResponse("m", "1", "", [from_array("y", FLOATS), from_array("z", FLOATS)], Timing())
    body, header_length = encode_infer(sent, {}, form)
    assert content(key) == FLOATS.tobytes() + bytes(8)
    answer = json.loads(body[:header_length])
    assert answer["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": place("r", 8)},
        {"name": "z", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
    ]
    assert body[header_length:] == FLOATS.tobytes()


def test_rest_requests_are_refused_without_shared_memory():
    for message in (
        {"inputs": [tensor("x", parameters=place("r", 8))]},
        {"inputs": [], "outputs": [{"name": "y", "parameters": place("r", 8)}]},
    ):
        with pytest.raises(InvalidRequest, match="does not support shared memory"):
            decode_infer(encoded(**message), NOTHING)


def test_shared_memory_that_is_not_allowed_is_forbidden(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path, is_allowed=False)
    place = RegionPlace("r", 0, 1)
    for ask in (
        lambda: memory.register("r", "/key", 0, 1),
        lambda: memory.status("r"),
        lambda: memory.read("x", place, 0),
        lambda: memory.open_target("y", place),
    ):
        with pytest.raises(Forbidden, match="--allow-shared-memory"):
            ask()
    assert memory.status() == []
    memory.unregister()  # as clients do before they start
