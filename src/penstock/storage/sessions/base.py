"""Where the records of ordered sessions are kept, for the gateway that has a session next."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TakenSession:
    """What a gateway finds when it takes a session."""

    epoch: int  # with which it may write; each owner's is higher than those before
    holder: str = ""  # another gateway that has it; then it was not taken, and `epoch` is the other's
    state: bytes = b""  # empty: nothing was ever done in it
    begun: int = 0  # the number of a step that was begun and did not end; 0: none
    answers: dict[int, bytes] = field(default_factory=dict)  # by number


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step that begins or has ended."""

    epoch: int
    life: int  # a session that begins anew is another: what is kept of the one before goes
    number: int
    state: bytes  # of the session, as it is with this
    answer: bytes = b""  # of a step that ended; empty: none is kept
    answers: int = 0  # that are kept: what is so much older goes


class SessionStore(Protocol):
    """Each write compares and sets at once, so that of two gateways which think they own a session one goes on.

    Every call raises Unavailable where the store does not answer in time.
    """

    async def close(self) -> None: ...

    async def take(self, key: str, owner: str, ttl_s: float, instead_of: int = 0) -> TakenSession:
        """Makes `owner` the session's owner: where nobody is, where it was, or instead of the one of that epoch."""
        ...

    async def move(self, key: str, to: str) -> bool:
        """The record has another key from now on, and no owner. False: there is none, or one under that key."""
        ...

    async def begin(self, key: str, step: StepRow, ttl_s: float) -> bool:
        """The step runs now. False: the session has another owner, or is further on; nothing may run."""
        ...

    async def end(self, key: str, step: StepRow, ttl_s: float) -> bool:
        """The step that was begun has ended, and the next number is awaited. False: the session has another owner."""
        ...

    async def release(self, key: str, epoch: int) -> None:
        """The owner has it no more; whoever comes first takes it."""
        ...
