"""What one stream holds: a window over its requests and unsent answers, and the order of the answers. Decides only."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

A = TypeVar("A")

# Requests of one stream that are inside at once; beyond it the stream is not read further.
STREAM_WINDOW = 256
# Of requests and of answers that the client has not taken yet, together; one more message may come on top.
STREAM_BYTES = 32 * 1024 * 1024
# What an answer is taken for until the stream has seen some: small requests may have large answers.
FIRST_ANSWER_BYTES = 1024 * 1024


@dataclass(slots=True, eq=False)
class StreamSlot(Generic[A]):
    """One request of a stream, from when it is read until its last answer is sent."""

    request_bytes: int
    held_bytes: int
    is_decoupled: bool
    answer_bytes: int = 0
    answer: A = field(init=False)  # while has_answer
    has_answer: bool = False  # that waits to be sent
    is_last: bool = False
    is_over: bool = False


class StreamBuffer(Generic[A]):
    """Answers go out in the order of their requests, or as they come.

    Those of a decoupled model always go out as they come, in their own order: it may answer for long, or never.
    """

    def __init__(self, is_ordered: bool, max_requests: int = STREAM_WINDOW, max_bytes: int = STREAM_BYTES) -> None:
        self._is_ordered = is_ordered
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._expected_bytes = FIRST_ANSWER_BYTES
        self._line: deque[StreamSlot[A]] = deque()  # requests in order, whose answers wait for those before
        self._ready: deque[StreamSlot[A]] = deque()
        self.requests = 0
        self.bytes = 0

    def has_room(self) -> bool:
        """Whether the next message may be read; one always may, however large."""
        return not self.requests or (self.requests < self._max_requests and self.bytes < self._max_bytes)

    def begin(self, request_bytes: int, is_decoupled: bool) -> StreamSlot[A]:
        slot: StreamSlot[A] = StreamSlot(request_bytes, request_bytes + self._expected_bytes, is_decoupled)
        self.requests += 1
        self.bytes += slot.held_bytes
        if self._is_ordered and not is_decoupled:
            self._line.append(slot)
        return slot

    def put(self, slot: StreamSlot[A], answer: A, answer_bytes: int, is_last: bool = True) -> None:
        """An answer to be sent; the next one of this request may come when it is."""
        assert not slot.has_answer, "one answer of a request at a time"
        assert not slot.is_last, "none after the last"
        slot.answer = answer
        slot.answer_bytes = answer_bytes
        slot.has_answer = True
        slot.is_last = is_last
        self._hold(slot, answer_bytes if is_last else slot.request_bytes + answer_bytes)
        self._expected_bytes = max(answer_bytes, self._expected_bytes * 7 // 8)
        if slot.is_decoupled or not self._is_ordered:
            self._ready.append(slot)
            return
        while self._line and self._line[0].has_answer:
            self._ready.append(self._line.popleft())

    def next(self) -> StreamSlot[A] | None:
        """The slot whose answer is to be sent now."""
        return self._ready.popleft() if self._ready else None

    def sent(self, slot: StreamSlot[A]) -> None:
        del slot.answer
        slot.has_answer = False
        if slot.is_last:
            self.end(slot)

    def end(self, slot: StreamSlot[A]) -> None:
        """The request has had all its answers."""
        assert not slot.is_over, "it ends once"
        assert not slot.has_answer, "all is sent"
        slot.is_last = slot.is_over = True
        self.requests -= 1
        self._hold(slot, 0)

    def _hold(self, slot: StreamSlot[A], held_bytes: int) -> None:
        self.bytes += held_bytes - slot.held_bytes
        slot.held_bytes = held_bytes
