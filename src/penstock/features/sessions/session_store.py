"""The protocol of a store for the records of ordered sessions, shared by all gateways."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TakenSession:
    """The result of taking a session: its record, or the gateway that owns it."""

    epoch: int  # the new owner writes with this epoch, which is higher than those of earlier owners
    holder: str = ""  # if not empty: this other gateway owns the session, which was not taken; `epoch` is the owner's
    state: bytes = b""  # empty: no step of the session was ever started
    unconfirmed: int = 0  # number of a step that was started and did not end; 0: none
    answers: dict[int, bytes] = field(default_factory=dict)  # by step number


@dataclass(frozen=True, slots=True)
class StepRow:
    """The record of a step in the store, at the start or the end of the step."""

    epoch: int
    life: int  # a new life removes the answers of the previous life
    number: int
    state: bytes  # of the session after this event
    answer: bytes = b""  # of a step that ended; empty: no answer is stored
    answers: int = 0  # number of answers to store: the answer of the step this many numbers earlier is removed


class SessionStore(Protocol):
    """Stores the records of sessions.

    Each write compares and sets atomically, so that only one of two gateways that both claim a session can write.
    Every call raises Unavailable if the store does not answer in time.
    """

    async def close(self) -> None: ...

    async def take(self, key: str, owner: str, ttl_s: float, instead_of: int = 0) -> TakenSession:
        """Make `owner` the session's owner, unless the session has another owner.

        Replace another owner if the session's epoch is `instead_of`.
        """
        ...

    async def move(self, key: str, to: str) -> bool:
        """Rename a record to `to` and clear its owner; return False if the record does not exist, or `to` exists."""
        ...

    async def begin(self, key: str, step: StepRow, ttl_s: float) -> bool:
        """Record that a step starts. Return False if the epoch or number is outdated; the step must not run then."""
        ...

    async def end(self, key: str, step: StepRow, ttl_s: float) -> bool:
        """Record that a started step has ended; return False if the session has another owner."""
        ...

    async def release(self, key: str, epoch: int) -> None:
        """Clear the owner, so that any gateway can take the session."""
        ...
