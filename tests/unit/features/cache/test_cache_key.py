"""Requests whose answers may differ have different keys, and equal requests have equal keys."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.core.blocks import BlockDescription
from penstock.core.principals import Principal
from penstock.core.requests import Controls, InferRequest, Parameter
from penstock.core.settings import Batching, BlockSettings, Caching, Instances
from penstock.core.tensors import Tensor, pack_bytes
from penstock.features.cache.cache_key import DIGEST_BYTES, CacheKeys, make_key_prefix


def block(**changes: Any) -> BlockDescription:
    made = BlockDescription(
        "blk-1", "m", "1", "onnxruntime_onnx", "fp32", (), (), 8, 1, BlockSettings(), fingerprint="f1"
    )
    return replace(made, **changes)


MAKER = CacheKeys(block())


def key(*inputs: Tensor, outputs: list[str] | None = None, parameters: dict[str, Parameter] | None = None) -> bytes:
    return MAKER.compute_key(InferRequest("m", list(inputs), outputs=outputs or [], parameters=parameters or {}))


def tensor(name: str = "x", datatype: str = "UINT8", shape: tuple[int, ...] = (4,), data: bytes = b"abcd") -> Tensor:
    return Tensor(name, datatype, shape, data)


def all_differ(keys: list[bytes]) -> bool:
    return len(set(keys)) == len(keys)


def test_a_key_begins_with_its_block() -> None:
    made = key(tensor())
    assert made.startswith(make_key_prefix("blk-1"))
    assert len(made) == len(make_key_prefix("blk-1")) + DIGEST_BYTES
    assert made == key(tensor())


def test_names_datatypes_shapes_and_bytes_change_the_key() -> None:
    assert all_differ(
        [
            key(tensor()),
            key(tensor("y")),
            key(tensor(datatype="INT8")),
            key(tensor(shape=(2, 2))),
            key(tensor(shape=(4, 1))),
            key(tensor(data=b"abce")),
            key(tensor(), outputs=["o"]),
            key(tensor(), outputs=["o", "p"]),
            key(tensor(), outputs=["o,p"]),
            key(tensor(), parameters={"p": 1}),
        ]
    )


def test_the_boundary_between_tensors_changes_the_key() -> None:
    def pair(first: bytes, second: bytes) -> bytes:
        # The shape of a BYTES tensor does not contain its length.
        return key(Tensor("a", "BYTES", (1,), first), Tensor("b", "BYTES", (1,), second))

    assert all_differ(
        [
            pair(b"ab", b"c"),
            pair(b"a", b"bc"),
            pair(b"abc", b""),
            pair(b"", b"abc"),
            key(Tensor("a", "BYTES", (1,), b"abc")),
            key(Tensor("ab", "BYTES", (1,), b"abc")),
        ]
    )


def test_the_boundary_between_texts_changes_the_key() -> None:
    def texts(*elements: str) -> bytes:
        return key(Tensor("text", "BYTES", (len(elements),), pack_bytes(elements)))

    assert all_differ([texts("ab", "c"), texts("a", "bc"), texts("abc"), texts("abc", ""), texts("", "abc")])


def test_names_that_look_like_structure_give_different_keys() -> None:
    quoted = "x', 'UINT8', (4,), 4), ('y"
    assert all_differ(
        [
            key(tensor("x"), tensor("y")),
            key(tensor(quoted)),
            key(tensor("x\\")),
            key(tensor("x\x00")),
            key(tensor("x"), outputs=["y'], [('p', 1)"]),
            key(tensor("x"), outputs=["y"], parameters={"p": 1}),
        ]
    )


def test_a_name_that_is_not_valid_text_is_accepted() -> None:
    assert key(tensor("\ud800")) != key(tensor("\ud801"))


def test_the_order_of_inputs_and_parameters_does_not_change_the_key() -> None:
    a, b = tensor("a"), tensor("b", data=b"wxyz")
    assert key(a, b) == key(b, a)
    assert key(a, parameters={"p": 1, "q": "z"}) == key(a, parameters={"q": "z", "p": 1})


def test_the_order_of_outputs_changes_the_key() -> None:
    assert key(tensor(), outputs=["o", "p"]) != key(tensor(), outputs=["p", "o"])


def test_parameters_of_different_types_differ() -> None:
    kinds: list[Parameter] = [1, 1.0, True, "1", "True", 0, 0.0, -0.0, False, "", "1.0"]
    assert all_differ([key(tensor(), parameters={"p": value}) for value in kinds] + [key(tensor())])
    assert key(tensor(), parameters={"pq": "r"}) != key(tensor(), parameters={"p": "qr"})


@pytest.mark.parametrize(
    "name",
    [
        "priority",
        "timeout",
        "cache",
        "session_id",
        "seq_no",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "binary_data_output",
        "shared_memory_region",
    ],
)
def test_parameters_for_the_server_do_not_change_the_key(name: str) -> None:
    assert key(tensor(), parameters={name: 7}) == key(tensor())
    assert key(tensor(), parameters={name: 7, "p": 1}) == key(tensor(), parameters={"p": 1})


def test_version_request_id_and_transport_do_not_change_the_key() -> None:
    plain = InferRequest("m", [tensor()])
    other = InferRequest(
        "m",
        [Tensor("x", "UINT8", (4,), memoryview(b"abcd"))],
        version="1",
        request_id="r-7",
        timeout_s=3.0,
        traceparent="00-1",
        protocol="rest",
        size_bytes=4,
        controls=Controls(priority=3, cache="refresh"),
    )
    assert MAKER.compute_key(plain) == MAKER.compute_key(other)


def test_block_version_files_and_task_change_the_key() -> None:
    blocks = [
        block(),
        block(block_id="blk-2"),
        block(version="2"),
        block(fingerprint="f2"),
        block(settings=BlockSettings(task="embed")),
    ]
    request = InferRequest("m", [tensor()])
    assert all_differ([CacheKeys(one).compute_key(request)[-DIGEST_BYTES:] for one in blocks])


def test_batching_and_instances_do_not_change_the_key() -> None:
    faster = block(settings=BlockSettings(batching=Batching(max_rows=64), instances=Instances(count=4)), instances=4)
    assert CacheKeys(faster).compute_key(InferRequest("m", [tensor()])) == key(tensor())


def test_callers_have_different_keys_unless_answers_are_shared() -> None:
    def of(maker: CacheKeys, *key_ids: str) -> list[bytes]:
        return [maker.compute_key(InferRequest("m", [tensor()], principal=Principal("name", each))) for each in key_ids]

    assert all_differ(of(MAKER, "", "k1", "k2"))
    assert of(MAKER, "") == [key(tensor())], "no keys are required"
    assert of(MAKER, "k1") == of(MAKER, "k1")
    shared = CacheKeys(block(settings=BlockSettings(cache=Caching(enabled=True, shared=True))))
    assert len(set(of(shared, "", "k1", "k2"))) == 1
