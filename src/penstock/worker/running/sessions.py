"""The sessions that a block's model knows of on one worker: which are new to it, which are over. Decides; never acts.

A session is begun when the first of its jobs is handed to the model, and over when a job that ends it has run, when
it begins anew, when it had no job for `idle_s`, or when the block is let go. It is not idle while a job of it is here.
"""

from dataclasses import dataclass
from math import inf

from penstock.core.requests import SessionStep


@dataclass(slots=True)
class SessionStart:
    """How a job finds its session."""

    is_new: bool  # to the model
    is_anew: bool  # what the model knows of it is over


@dataclass(slots=True)
class _KnownSession:
    jobs: int = 0  # here, waiting or running
    is_begun: bool = False


class ModelSessions:
    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._sessions: dict[str, _KnownSession] = {}
        self._idle: dict[str, float] = {}  # since when; the one that has been idle for longest is first

    def __len__(self) -> int:
        return len(self._sessions)

    def enter(self, session_id: str) -> None:
        """A job of the session has come."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _KnownSession()
        session.jobs += 1
        self._idle.pop(session_id, None)

    def start(self, step: SessionStep) -> SessionStart:
        """A job of the session goes to the model."""
        session = self._sessions[step.session_id]
        was_begun, session.is_begun = session.is_begun, True
        return SessionStart(is_new=step.is_start or not was_begun, is_anew=step.is_start and was_begun)

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
        over: list[str] = []
        for session_id, since in self._idle.items():
            if since + self._idle_s > now:
                break
            over.append(session_id)
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
