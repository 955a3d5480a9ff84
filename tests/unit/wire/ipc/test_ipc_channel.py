"""Messages between two processes, small and large, and a peer that disconnects."""

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.core.tensors import Tensor, from_array, to_array
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.ipc_channel import IpcChannel, PeerGone
from penstock.wire.ipc.ipc_messages import MAX_INLINE_BYTES, Inbox, Message

Ends = tuple[IpcChannel, IpcChannel, socket.socket, Arena]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Return two channels, the second's socket, and the memory from the first to the second."""
    left, right = socket.socketpair()
    forth, back = Arena.create(), Arena.create()
    theirs = [Arena(os.dup(arena.fd)) for arena in (forth, back)]
    yield IpcChannel(left, [forth], [back]), IpcChannel(right, [theirs[1]], [theirs[0]]), right, forth
    left.close()
    right.close()
    for arena in (forth, back, *theirs):
        arena.close()


def test_a_message_round_trips(ends: Ends) -> None:
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


@pytest.mark.parametrize("size", [0, 1, MAX_INLINE_BYTES // 2, MAX_INLINE_BYTES // 2 + 1, 3_000_001, 5])
def test_tensors_of_any_size_round_trip(ends: Ends, size: int) -> None:
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
    assert (os.fstat(memory.fd).st_size > 0) == (2 * size > MAX_INLINE_BYTES)


def test_silence_is_a_timeout_and_the_next_message_arrives(ends: Ends) -> None:
    here, there, _, _ = ends
    with pytest.raises(TimeoutError):
        there.receive(time.monotonic() + 0.01)
    here.send(Message("late"))
    assert there.receive().kind == "late"


def test_a_peer_that_stops_reading_is_a_timeout(ends: Ends) -> None:
    here, _, _, _ = ends
    message = Message("m", tensors=[Tensor("t", "UINT8", (MAX_INLINE_BYTES,), b"x" * MAX_INLINE_BYTES)])

    def send_all() -> None:
        for _ in range(100):
            here.send(message, time.monotonic() + 0.01)

    with pytest.raises(PeerGone, match="stopped reading"):
        send_all()


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff" * 64,
        b"\x02\0\0\0\0\0\0\0{}",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x01\0\0\0\0\0\0\0x",
        Message("no such slot", slot=7).pack(Arena.create()),
        Message("not in its arena", tensors=[Tensor("t", "UINT8", (70_000,), bytes(70_000))]).pack(Arena.create()),
    ],
)
def test_an_invalid_message_is_refused(ends: Ends, sent: bytes) -> None:
    here, _, raw, _ = ends
    raw.send(sent)
    with pytest.raises(PeerGone, match="invalid message"):
        here.receive()


def test_a_peer_that_closes_is_gone(ends: Ends) -> None:
    here, _, raw, _ = ends
    raw.send(b"\x02\0")
    raw.close()
    with pytest.raises(PeerGone):
        here.receive()
    with pytest.raises(PeerGone):
        here.send(Message("m"))


def test_messages_split_at_any_byte_are_received() -> None:
    arena = Arena.create()
    fields: list[dict[str, Any]] = [{"n": 1}, {"text": "zażółć"}, {"many": list(range(1000))}]
    stream = b"".join(Message("m", each, [Tensor("t", "UINT8", (3,), b"abc")]).pack(arena) for each in fields)
    for step in (1, 3, 7, len(stream)):
        inbox = Inbox()
        found = [envelope for at in range(0, len(stream), step) for envelope in inbox.feed(stream[at : at + step])]
        assert [envelope.fields for envelope in found] == fields
        assert [bytes(tensor.data) for each in found for tensor in each.open(arena).tensors] == [b"abc"] * 3
