"""Messages between an engine and a model's process, small and large, and a peer that breaks off."""

import math
import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.core.tensors import Tensor, from_array, to_array
from penstock.engines.python import memory as python_memory
from penstock.engines.python.memory import Arena
from penstock.engines.python.messages import INLINE_BYTES, TAIL_CHARS, Channel, Message, PeerGone, tail

Ends = tuple[Channel, Channel, socket.socket, Arena]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two channels, the second's socket, and the memory from the first to the second."""
    left, right = socket.socketpair()
    forth, back = Arena.create(), Arena.create()
    theirs = [Arena(os.dup(arena.fd)) for arena in (forth, back)]
    yield Channel(left, forth, back), Channel(right, theirs[1], theirs[0]), right, forth
    left.close()
    right.close()
    for arena in (forth, back, *theirs):
        arena.close()


def test_a_message_comes_as_it_went(ends: Ends) -> None:
    here, there, _, _ = ends
    fields = {"text": "é\udcff", "number": 2**63, "nan": math.nan, "inf": -math.inf, "list": [1, None, True]}
    here.send(Message("kind", fields, [from_array("a", np.arange(3)), Tensor("b", "FP32", (0,), b"")]))
    here.send(Message("next"))
    found = there.receive()
    assert math.isnan(found.fields.pop("nan"))
    del fields["nan"]
    assert (found.kind, found.fields) == ("kind", fields)
    assert [to_array(tensor).tolist() for tensor in found.tensors] == [[0, 1, 2], []]
    assert there.receive() == Message("next", {}, [])


@pytest.mark.parametrize("size", [0, 1, INLINE_BYTES // 2, INLINE_BYTES // 2 + 1, 3_000_001, 5])
def test_tensors_of_any_size(ends: Ends, size: int) -> None:
    here, there, _, memory = ends
    arrays = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i in range(2)]
    for _ in range(2):
        for sender, receiver in ((here, there), (there, here)):
            message = Message("m", tensors=[from_array("t", array) for array in arrays])
            sending = threading.Thread(target=sender.send, args=(message,))  # more than a socket holds
            sending.start()
            found = receiver.receive().tensors
            sending.join()
            assert [bytes(tensor.data) for tensor in found] == [array.tobytes() for array in arrays]
    assert (os.fstat(memory.fd).st_size > 0) == (2 * size > INLINE_BYTES)


def test_memory_of_a_rare_large_message_is_given_back(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, _, memory = ends
    monkeypatch.setattr(python_memory, "KEEP_BYTES", 1024 * 1024)
    here.send(Message("m", tensors=[from_array("t", np.ones(8 * 1024 * 1024, np.uint8))]))
    assert os.fstat(memory.fd).st_blocks * 512 >= 8 * 1024 * 1024
    there.receive()
    assert os.fstat(memory.fd).st_blocks * 512 <= 1024 * 1024


def test_neither_side_can_take_memory_from_under_the_other(ends: Ends) -> None:
    *_, memory = ends
    memory.write([b"x" * 5_000_000])
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)


def test_memory_that_was_announced_but_is_not_there(ends: Ends) -> None:
    *_, memory = ends
    with pytest.raises(ValueError, match="were announced"):
        memory.read([1])


def test_silence_is_a_timeout_and_the_next_message_comes(ends: Ends) -> None:
    here, there, _, _ = ends
    with pytest.raises(TimeoutError):
        there.receive(time.monotonic() + 0.01)
    here.send(Message("late"))
    assert there.receive().kind == "late"


def test_a_peer_that_stops_reading(ends: Ends) -> None:
    here, _, _, _ = ends
    message = Message("m", tensors=[Tensor("t", "UINT8", (INLINE_BYTES,), b"x" * INLINE_BYTES)])

    def send_all() -> None:
        for _ in range(100):
            here.send(message, time.monotonic() + 0.01)

    with pytest.raises(PeerGone, match="stopped reading"):
        send_all()


@pytest.mark.parametrize(
    "sent", [b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]", b"\x01\0\0\0\0\0\0\0x"]
)
def test_what_is_no_message(ends: Ends, sent: bytes) -> None:
    here, _, raw, _ = ends
    raw.send(sent)
    with pytest.raises(PeerGone, match="no message"):
        here.receive()


def test_a_peer_that_closes(ends: Ends) -> None:
    here, _, raw, _ = ends
    raw.send(b"\x02\0")
    raw.close()
    with pytest.raises(PeerGone):
        here.receive()
    with pytest.raises(PeerGone):
        here.send(Message("m"))


def test_the_end_of_a_long_text_is_kept() -> None:
    assert tail("a\nb\n\n") == "a\nb"
    long = tail("\n".join(f"line {number} {'x' * 200}" for number in range(1000)))
    assert len(long) == TAIL_CHARS
    assert long.startswith("…")
    assert long.endswith(f"line 999 {'x' * 200}")
