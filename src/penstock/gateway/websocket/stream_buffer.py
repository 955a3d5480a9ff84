"""The requests and unsent answers of one stream, their limits, and the order of the answers. Pure: no I/O."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

A = TypeVar("A")

# Running requests of one stream; at this number, no further messages are read.
STREAM_WINDOW = 256
# Bytes of running requests and unsent answers; one more message may exceed this.
STREAM_BYTES = 32 * 1024 * 1024
# The expected size of the first answers, because small requests may have large answers.
FIRST_ANSWER_BYTES = 1024 * 1024


@dataclass(slots=True, eq=False)
class StreamSlot(Generic[A]):
    """One request of a stream, from its arrival until its last answer is sent."""

    request_bytes: int
    held_bytes: int
    is_decoupled: bool
    answer_bytes: int = 0
    answer: A = field(init=False)  # only set while has_answer
    has_answer: bool = False  # an answer waits to be sent
    is_last: bool = False
    is_over: bool = False


class StreamBuffer(Generic[A]):
    """The slots of a stream. Answers are sent in the order of their requests if `is_ordered`, otherwise as they come.

    Answers of decoupled models are always sent as they come, because such a model may answer for long, or never.
    """

    def __init__(self, is_ordered: bool, max_requests: int = STREAM_WINDOW, max_bytes: int = STREAM_BYTES) -> None:
        self._is_ordered = is_ordered
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._expected_bytes = FIRST_ANSWER_BYTES
        self._ordered_slots: deque[StreamSlot[A]] = (
            deque()
        )  # requests in order; an answer waits for the answers to earlier requests
        self._ready_slots: deque[StreamSlot[A]] = deque()
        self.requests = 0
        self.bytes = 0

    def has_room(self) -> bool:
        """Return whether the next message may be read. An empty stream may always read a message, of any size."""
        return not self.requests or (self.requests < self._max_requests and self.bytes < self._max_bytes)

    def begin(self, request_bytes: int, is_decoupled: bool) -> StreamSlot[A]:
        slot: StreamSlot[A] = StreamSlot(request_bytes, request_bytes + self._expected_bytes, is_decoupled)
        self.requests += 1
        self.bytes += slot.held_bytes
        if self._is_ordered and not is_decoupled:
            self._ordered_slots.append(slot)
        return slot

    def put(self, slot: StreamSlot[A], answer: A, answer_bytes: int, is_last: bool = True) -> None:
        """Add an answer to be sent. Do not add the next answer of the request before this answer was sent."""
        assert not slot.has_answer, "the previous answer was not sent"
        assert not slot.is_last, "the last answer was already added"
        slot.answer = answer
        slot.answer_bytes = answer_bytes
        slot.has_answer = True
        slot.is_last = is_last
        self._set_held_bytes(slot, answer_bytes if is_last else slot.request_bytes + answer_bytes)
        self._expected_bytes = max(answer_bytes, self._expected_bytes * 7 // 8)
        if slot.is_decoupled or not self._is_ordered:
            self._ready_slots.append(slot)
            return
        while self._ordered_slots and self._ordered_slots[0].has_answer:
            self._ready_slots.append(self._ordered_slots.popleft())

    def peek_slot(self) -> StreamSlot[A] | None:
        """Return the slot whose answer must be sent next, or None."""
        return self._ready_slots.popleft() if self._ready_slots else None

    def mark_sent(self, slot: StreamSlot[A]) -> None:
        del slot.answer
        slot.has_answer = False
        if slot.is_last:
            self.end(slot)

    def end(self, slot: StreamSlot[A]) -> None:
        """Remove a request whose answers were all sent."""
        assert not slot.is_over, "the request already ended"
        assert not slot.has_answer, "an answer was not sent"
        slot.is_last = slot.is_over = True
        self.requests -= 1
        self._set_held_bytes(slot, 0)

    def _set_held_bytes(self, slot: StreamSlot[A], held_bytes: int) -> None:
        self.bytes += held_bytes - slot.held_bytes
        slot.held_bytes = held_bytes
