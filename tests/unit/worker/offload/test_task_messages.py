"""Messages between a worker and a task process survive encoding."""

import ml_dtypes
import numpy as np
import pytest

from penstock.core.errors import InternalError
from penstock.core.tensors import Array
from penstock.tasks.base import Piece, Prepared
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.ipc_messages import Inbox, Message
from penstock.worker.offload.task_messages import describe_prepared, describe_results, read_prepared, read_results


def roundtrip(prepared: Prepared) -> Prepared:
    described, tensors = describe_prepared(prepared)
    arena = Arena.create()
    (envelope,) = Inbox().feed(Message("prepared", described, tensors).pack(arena))
    found = envelope.open(arena)
    return read_prepared(found.fields, found.tensors)


def test_pieces_survive_encoding():
    arrays = {
        "half": np.array([[0.5, -2]], ml_dtypes.bfloat16),
        "none": np.zeros((0, 3), np.float32),
        "texts": np.array([[b"a", b""], ["zażółć".encode(), b"\0"]], dtype=object),
        "slice": np.arange(64, dtype=np.int16).reshape(8, 8)[2:4, 1:5],
    }
    pieces = [Piece(arrays, 3, 17, ("a", (1, -2)), 5), Piece({}, key=None)]
    sent = Prepared(pieces, parameters={"tokens": 4, "is": True}, order=np.array([1, 0], np.int32))
    found = roundtrip(sent)
    assert found.order is not None
    assert (found.order.tolist(), found.order.dtype) == ([1, 0], np.dtype(np.int32))
    assert found.parameters == sent.parameters
    first, second = found.pieces
    assert (first.rows, first.length, first.key, first.padding) == (3, 17, ("a", (1, -2)), 5)
    assert (second.rows, second.length, second.key, second.padding, second.arrays) == (1, 1, None, 0, {})
    assert list(first.arrays) == list(arrays)
    for name, array in arrays.items():
        assert first.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(first.arrays[name], array)


def test_unjoinable_keys_stay_unequal():
    one, other = object(), object()
    sent = Prepared([Piece({}, key=one), Piece({}, key=(other, 1)), Piece({}, key=one)])
    first, second, third = (piece.key for piece in roundtrip(sent).pieces)
    assert first == third
    assert isinstance(second, tuple)
    assert second[0] != first
    assert roundtrip(sent).pieces[0].key != first  # of another request


def test_a_key_that_cannot_be_encoded_is_refused():
    with pytest.raises(InternalError, match="bytes"):
        describe_prepared(Prepared([Piece({}, key=b"raw")]))


def test_results_are_grouped_by_piece():
    results: list[list[Array]] = [[np.ones((2, 2), np.float32), np.zeros(1, np.int8)], [], [np.array([5], np.int64)]]
    counts, tensors = describe_results(results)
    found = read_results(counts, tensors)
    assert [len(result) for result in found] == [2, 0, 1]
    np.testing.assert_array_equal(found[0][0], results[0][0])
    assert found[2][0].tolist() == [5]
