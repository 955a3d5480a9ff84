"""Whole packets as tensors, and the answers of models that take them."""

import numpy as np
import pytest

from penstock.core.errors import EngineFailed, InvalidTensor
from penstock.core.packets import (
    Packet,
    PacketAnswer,
    PacketFile,
    pack_answer,
    pack_packet,
    unpack_files,
    unpack_packet,
)

PACKET = Packet("s", 2**64 - 1, 1.5, '{"a": 1}', [PacketFile({"file_name": "é"}, b"\x00"), PacketFile({}, b"")])


def test_a_packet_survives_as_tensors() -> None:
    assert unpack_packet(pack_packet(PACKET)) == PACKET
    assert PACKET.json() == {"a": 1}


@pytest.mark.parametrize("answer", [{"a": 1}, [1], None, "text", 1.5])
def test_a_model_may_return_the_data_alone(answer: object) -> None:
    found = pack_answer(answer)
    assert (len(found["files"]), len(found["data"])) == (0, 1)


@pytest.mark.parametrize(
    "answer",
    [
        object(),
        PacketAnswer({}, ["file"]),  # type: ignore[list-item]
        PacketAnswer({}, [PacketFile({}, "text")]),  # type: ignore[arg-type]
        PacketAnswer({}, [PacketFile({"n": 2**64}, b"")]),
        PacketAnswer({}, [PacketFile({"n": "\ud800"}, b"")]),
        "\ud800",
    ],
)
def test_answers_that_no_packet_can_carry_are_the_models_failure(answer: object) -> None:
    with pytest.raises(EngineFailed):
        pack_answer(answer)


def test_metadata_without_numbers_is_plain_json() -> None:
    (file,) = unpack_files(pack_answer(PacketAnswer({}, [PacketFile({"n": float("nan")}, b"1")])))
    assert file == PacketFile({"n": None}, b"1")


def test_tensors_that_are_not_a_packet_are_refused() -> None:
    arrays = pack_packet(PACKET)
    for name, value in (("metadata", [b"{", b""]), ("data", [b"\xff"]), ("files", [b""])):
        column = np.empty(len(value), dtype=object)
        column[:] = value
        with pytest.raises(InvalidTensor):
            unpack_packet({**arrays, name: column})
