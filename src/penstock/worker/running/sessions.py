"""The sessions that a block's model knows of on one worker: which are new to it, which are over. Decides; never acts.

A session is begun when the first of its jobs is handed to the model, and over when a job that ends it has run, when
it begins anew, when it had no job for `idle_s`, or when the block is let go. It is not idle while a job of it is here.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import takewhile
from math import inf

from penstock.core.requests import SessionStep


@dataclass(slots=True)
class _KnownSession:
    jobs: int = 0  # here, waiting or running
    is_begun: bool = False


class ModelSessions:
    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._sessions: defaultdict[str, _KnownSession] = defaultdict(_KnownSession)
        self._idle: dict[str, float] = {}  # since when; the one that has been idle for longest is first

    def __len__(self) -> int:
        return len(self._sessions)

    def enter(self, session_id: str) -> None:
        """A job of the session has come."""
        self._sessions[session_id].jobs += 1
        self._idle.pop(session_id, None)

    def __contains__(self, session_id: str) -> bool:
        """Whether the model knows it, or will with a job that is here."""
        return session_id in self._sessions

    def start(self, step: SessionStep) -> tuple[bool, bool]:
        """A job goes to the model: is the session new to it, and is what it knows of an earlier one over?"""
        session = self._sessions[step.session_id]
        was_begun, session.is_begun = session.is_begun, True
        return step.is_start or not was_begun, step.is_start and was_begun

    def end(self, session_id: str) -> None:
        """The job that ends the session has run, and the model was told."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.is_begun = False
        if session.jobs == 0:  # its caller has left meanwhile
            self._forget(session_id)

    def leave(self, session_id: str, now: float) -> None:
        """A job of the session is answered or gone."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.jobs -= 1
        if session.jobs == 0:
            if session.is_begun:
                self._idle[session_id] = now
            else:
                self._forget(session_id)

    def next_due(self) -> float:
        for since in self._idle.values():
            return since + self._idle_s
        return inf

    def expire(self, now: float) -> list[str]:
        """Forgets the sessions that were idle for too long; the model must be told of each."""
        over = list(takewhile(lambda idle: self._idle[idle] + self._idle_s <= now, self._idle))
        for session_id in over:
            self._forget(session_id)
        return over

    def clear(self) -> list[str]:
        """The block is let go: the sessions that the model must be told of."""
        begun = [session_id for session_id, session in self._sessions.items() if session.is_begun]
        for session_id in begun:
            self.end(session_id)
        return begun

    def _forget(self, session_id: str) -> None:
        del self._sessions[session_id]
        self._idle.pop(session_id, None)
