"""Remembers to which blocks the earlier requests of sessions were resolved. Pure: no I/O."""

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple


class SessionChoice(NamedTuple):
    cluster_id: str
    block_id: str
    until: float


class SessionChoices:
    """A bounded map from a session and its query to a block; an entry ends after `ttl_s`."""

    def __init__(self, ttl_s: float, max_sessions: int) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._choices: OrderedDict[bytes, SessionChoice] = OrderedDict()

    def __len__(self) -> int:
        return len(self._choices)

    @staticmethod
    def key(session_id: str, query: str) -> bytes:
        """Return a key of fixed size, so that long queries do not fill the memory."""
        text = f"{len(session_id)}:{session_id}{query}"
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def find(self, key: bytes, now: float) -> SessionChoice | None:
        choice = self._choices.get(key)
        if choice is None:
            return None
        if choice.until <= now:
            del self._choices[key]
            return None
        return choice

    def keep(self, key: bytes, cluster_id: str, block_id: str, now: float) -> SessionChoice:
        """Store and return this choice, or return the choice that a concurrent request of the session has stored."""
        choice = self.find(key, now)
        if choice is None:
            choice = self._choices[key] = SessionChoice(cluster_id, block_id, now + self._ttl_s)
            if len(self._choices) > self._max_sessions:
                self._choices.popitem(last=False)
        return choice

    def drop(self, key: bytes) -> None:
        self._choices.pop(key, None)
