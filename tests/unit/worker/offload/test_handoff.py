"""What a worker and a task process hand each other comes out as it went in."""

import os

import ml_dtypes
import numpy as np
import pytest

from penstock.core.errors import InternalError
from penstock.core.tensors import Tensor, from_array
from penstock.tasks.base import Piece, Prepared
from penstock.worker.offload.handoff import (
    GRAIN_BYTES,
    KEPT_BYTES,
    Block,
    Frames,
    describe_prepared,
    describe_results,
    frame,
    read_prepared,
    read_results,
)


def pair() -> tuple[Block, Block]:
    """One block, as each of two processes has it."""
    writer = Block.create()
    return writer, Block(os.dup(writer.descriptor))


def passed_on(writer: Block, reader: Block, *tensors: Tensor) -> list[Tensor]:
    (header,) = Frames().feed(frame(writer.write(tensors)))
    return reader.read(header)


def tensors_of(*sizes: int) -> list[Tensor]:
    return [Tensor(f"t{i}", "UINT8", (size,), bytes([i + 1]) * size) for i, size in enumerate(sizes)]


def test_a_block_grows_and_shrinks_under_its_reader():
    writer, reader = pair()
    for sizes in ((), (0,), (1, 0, 3), (GRAIN_BYTES + 1,), (KEPT_BYTES + 1, 5), (7,), (KEPT_BYTES, 1), (100, 200)):
        sent = tensors_of(*sizes)
        found = passed_on(writer, reader, *sent)
        assert [(t.name, t.datatype, t.shape, t.data) for t in found] == [
            (t.name, t.datatype, t.shape, t.data) for t in sent
        ]
    assert os.fstat(writer.descriptor).st_size <= KEPT_BYTES


def test_what_was_read_stays_when_the_block_is_written_anew():
    writer, reader = pair()
    (first,) = passed_on(writer, reader, Tensor("x", "UINT8", (3,), b"abc"))
    passed_on(writer, reader, Tensor("x", "UINT8", (3,), b"xyz"))
    assert first.data == b"abc"


def test_frames_in_any_parts():
    headers = [{"n": 1}, {"text": "zażółć"}, {"many": list(range(1000))}]
    stream = b"".join(map(frame, headers))
    for step in (1, 3, 7, len(stream)):
        frames = Frames()
        found = [header for at in range(0, len(stream), step) for header in frames.feed(stream[at : at + step])]
        assert found == headers


def roundtrip(prepared: Prepared) -> Prepared:
    described, tensors = describe_prepared(prepared)
    (header,) = Frames().feed(frame(described))
    writer, reader = pair()
    return read_prepared(header, passed_on(writer, reader, *tensors))


def test_pieces_keep_all_they_have():
    arrays = {
        "half": np.array([[0.5, -2]], ml_dtypes.bfloat16),
        "none": np.zeros((0, 3), np.float32),
        "texts": np.array([[b"a", b""], ["zażółć".encode(), b"\0"]], dtype=object),
        "slice": np.arange(64, dtype=np.int16).reshape(8, 8)[2:4, 1:5],
    }
    sent = Prepared([Piece(arrays, 3, 17, ("a", (1, -2))), Piece({}, key=None)], parameters={"tokens": 4, "is": True})
    found = roundtrip(sent)
    assert found.parameters == sent.parameters
    first, second = found.pieces
    assert (first.rows, first.length, first.key) == (3, 17, ("a", (1, -2)))
    assert (second.rows, second.length, second.key, second.arrays) == (1, 1, None, {})
    assert list(first.arrays) == list(arrays)
    for name, array in arrays.items():
        assert first.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(first.arrays[name], array)


def test_keys_that_are_equal_to_themselves_alone_stay_so():
    one, other = object(), object()
    sent = Prepared([Piece({}, key=one), Piece({}, key=(other, 1)), Piece({}, key=one)])
    first, second, third = (piece.key for piece in roundtrip(sent).pieces)
    assert first == third
    assert second[0] != first
    assert roundtrip(sent).pieces[0].key != first  # another request's


def test_a_key_that_cannot_travel_is_refused():
    with pytest.raises(InternalError, match="bytes"):
        describe_prepared(Prepared([Piece({}, key=b"raw")]))


def test_results_by_piece():
    results = [[np.ones((2, 2), np.float32), np.zeros(1, np.int8)], [], [np.array([5], np.int64)]]
    counts, tensors = describe_results(results)
    found = read_results(counts, tensors)
    assert [len(result) for result in found] == [2, 0, 1]
    np.testing.assert_array_equal(found[0][0], results[0][0])
    assert found[2][0].tolist() == [5]


def test_blocks_close_what_they_open():
    before = len(os.listdir("/proc/self/fd"))
    blocks = pair()
    passed_on(*blocks, from_array("x", np.ones(10)))
    assert len(os.listdir("/proc/self/fd")) > before
    del blocks
    assert len(os.listdir("/proc/self/fd")) == before
