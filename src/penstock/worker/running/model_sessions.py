"""Decides which of a block's sessions are new to its model, and which are over. Pure: no I/O.

A session begins when its first job is passed to the model. It is over when a job that ends it has run, when it is
restarted, when it has had no job for `idle_s`, or when the block is unloaded. A session with a waiting or running job
is not idle.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import takewhile
from math import inf

from penstock.core.requests import SessionStep


@dataclass(slots=True)
class _KnownSession:
    jobs: int = 0  # waiting or running on this worker
    is_begun: bool = False


class ModelSessions:
    """Tracks the sessions of one block on one worker."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._sessions: defaultdict[str, _KnownSession] = defaultdict(_KnownSession)
        self._idle: dict[str, float] = {}  # when each idle session became idle; the longest idle first

    def __len__(self) -> int:
        return len(self._sessions)

    def enter(self, session_id: str) -> None:
        self._sessions[session_id].jobs += 1
        self._idle.pop(session_id, None)

    def __contains__(self, session_id: str) -> bool:
        """Return whether the model knows the session, or will know it when a waiting job has run."""
        return session_id in self._sessions

    def start(self, step: SessionStep) -> tuple[bool, bool]:
        """Return whether the session is new to the model, and whether the step restarts a session that it knows."""
        session = self._sessions[step.session_id]
        was_begun, session.is_begun = session.is_begun, True
        return step.is_start or not was_begun, step.is_start and was_begun

    def end(self, session_id: str) -> None:
        """Record that the last job of the session has run, after which the model no longer knows the session."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.is_begun = False
        if session.jobs == 0:  # the ending job was cancelled meanwhile
            self._forget_session(session_id)

    def leave(self, session_id: str, now: float) -> None:
        """Record that a job of the session was answered or removed."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.jobs -= 1
        if session.jobs == 0:
            if session.is_begun:
                self._idle[session_id] = now
            else:
                self._forget_session(session_id)

    def next_due(self) -> float:
        for since in self._idle.values():
            return since + self._idle_s
        return inf

    def expire(self, now: float) -> list[str]:
        """Remove and return the sessions that were idle for `idle_s`, so that the caller can end them in the model."""
        over = list(takewhile(lambda idle: self._idle[idle] + self._idle_s <= now, self._idle))
        for session_id in over:
            self._forget_session(session_id)
        return over

    def clear(self) -> list[str]:
        """Remove all sessions; return those that the model knows, so that the caller can end them in the model."""
        begun = [session_id for session_id, session in self._sessions.items() if session.is_begun]
        for session_id in begun:
            self.end(session_id)
        return begun

    def _forget_session(self, session_id: str) -> None:
        del self._sessions[session_id]
        self._idle.pop(session_id, None)
