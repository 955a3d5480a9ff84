"""The tensor task: checks, joined batches and split answers."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.core.errors import EngineFailed, InvalidTensor, RequestTooLarge
from penstock.core.signature import Signature
from penstock.core.tensors import Tensor, TensorSpec, from_array, pack_bytes, to_array
from penstock.tasks.base import TaskRequest
from penstock.tasks.tensor import TensorTask

MODEL = Signature(
    (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "INT64", (-1, -1))),
    (TensorSpec("y", "FP32", (-1, 2)), TensorSpec("z", "INT64", (-1, -1))),
    "onnxruntime_onnx",
    "fp32",
)


def request(rows: int = 1, width: int = 3, outputs: tuple[str, ...] = ()) -> TaskRequest:
    a = np.full((rows, 2), rows, np.float32)
    b = np.full((rows, width), rows, np.int64)
    return TaskRequest([from_array("a", a), from_array("b", b)], list(outputs))


def task(is_batched: bool | None = None) -> TensorTask:
    return TensorTask(MODEL, 4, is_batched)


def test_rows_of_several_requests_join_and_split_again() -> None:
    made = task()
    prepared = [made.prepare(request(1)), made.prepare(request(3))]
    pieces = [p.pieces[0] for p in prepared]
    joined = made.join(pieces)
    assert joined["a"].shape == (4, 2)
    results = made.split(pieces, [joined["a"], joined["b"]])
    (y, z) = made.finish(request(3), prepared[1], [results[1]])
    assert to_array(y).tolist() == [[3, 3]] * 3
    assert to_array(z).tolist() == [[3, 3, 3]] * 3


def test_only_equal_trailing_shapes_share_a_key() -> None:
    made = task()
    keys = [made.prepare(request(width=w)).pieces[0].key for w in (3, 3, 4)]
    assert keys[0] == keys[1] != keys[2]


def test_without_a_batch_dimension_nothing_is_ever_joined() -> None:
    made = task(is_batched=False)
    assert made.signature.max_batch_size == 0
    assert made.prepare(request()).pieces[0].key != made.prepare(request()).pieces[0].key


def test_outputs_are_selected() -> None:
    made = task()
    prepared = made.prepare(request(outputs=("z",)))
    joined = made.join(prepared.pieces)
    outputs = made.finish(request(outputs=("z",)), prepared, made.split(prepared.pieces, [joined["a"], joined["b"]]))
    assert [tensor.name for tensor in outputs] == ["z"]


def bad(**changes: object) -> TaskRequest:
    made = request()
    for name, value in changes.items():
        setattr(made.inputs[0], name, value)
    return made


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (bad(name="q"), "unknown input 'q'"),
        (bad(name="b"), "INT64"),
        (bad(datatype="FP64"), "takes FP32"),
        (bad(shape=(1, 3)), r"takes \[-1, 2\]"),
        (bad(shape=(2,)), "shape"),
        (bad(data=b"123"), "3 bytes"),
        (TaskRequest(request().inputs[:1], []), "missing input 'b'"),
        (TaskRequest([*request().inputs, request().inputs[0]], []), "repeated"),
        (request(outputs=("nope",)), "unknown output 'nope'"),
        (TaskRequest([request(1).inputs[0], request(2).inputs[1]], []), "different numbers of rows"),
        (request(0), "no rows"),
    ],
)
def test_invalid_request_names_the_problem(broken: TaskRequest, why: str) -> None:
    with pytest.raises(InvalidTensor, match=why):
        task().prepare(broken)


def test_more_rows_than_a_batch_holds_are_rejected() -> None:
    with pytest.raises(RequestTooLarge, match="at most 4"):
        task().prepare(request(5))


def test_a_model_that_changes_the_number_of_rows_fails_the_batch_not_the_worker() -> None:
    made = task()
    pieces = [made.prepare(request()).pieces[0], made.prepare(request()).pieces[0]]
    with pytest.raises(EngineFailed, match="is_batched"):
        made.split(pieces, [np.zeros((1, 2), np.float32), np.zeros((2, 3), np.int64)])


def test_warm_up_fits_the_signature() -> None:
    (inputs,) = task().warm_up_inputs()
    assert inputs["a"].shape == (1, 2)
    assert inputs["b"].dtype == np.int64


def texts(count: int) -> TaskRequest:
    return TaskRequest([Tensor("s", "BYTES", (1, count), pack_bytes([b"x"] * count))], [])


def test_texts_are_counted_before_they_are_read() -> None:
    spec = TensorSpec("s", "BYTES", (-1, -1))
    made = TensorTask(Signature((spec,), (spec,), "onnx", "fp32"), 4, None, max_elements=100)
    assert made.prepare(texts(100)).pieces[0].arrays["s"].shape == (1, 100)
    with pytest.raises(RequestTooLarge, match="has 101 elements; at most 100 are allowed: split the request"):
        made.prepare(texts(101))
    announced = Tensor("s", "BYTES", (1, 10**12), b"")
    with pytest.raises(RequestTooLarge):
        made.prepare(TaskRequest([announced], []))
    assert made.weigh(TaskRequest([announced], [])) == made.weigh(TaskRequest([replace(announced, shape=(100,))], []))


def test_wide_character_increases_the_memory_estimate_of_a_large_text() -> None:
    plain, wide = pack_bytes([b"a" * 2_000_000]), pack_bytes([b"a" * 2_000_000 + "\U0001f600".encode()])
    light, heavy = (task().weigh(TaskRequest([Tensor("s", "BYTES", (1,), data)], [])) for data in (plain, wide))
    assert heavy > 3 * light


def test_numbers_have_no_memory_estimate() -> None:
    assert task().weigh(request(4)) == 0
    assert task().weigh(TaskRequest([Tensor("s", "BYTES", (-1,), b"")], [])) == 0
