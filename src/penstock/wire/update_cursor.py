"""Tracks which of the manager's updates a worker or gateway has applied, and checks the next one. Pure: no I/O."""

from collections import deque
from enum import Enum
from typing import Protocol

MAX_PAST_HISTORIES = 16


class ManagerUpdate(Protocol):
    """The fields of an Assignment or a ClusterView that give its position in the sequence of updates."""

    history: str
    epoch: int
    revision: int
    is_snapshot: bool
    since: int


class UpdateVerdict(Enum):
    ACCEPTED = "accepted"  # apply the update
    MISSED = "missed"  # an earlier update is missing: request a snapshot
    DEPOSED = "deposed"  # the update's term is older than the newest known term: ignore it


class NewestTerm:
    """The newest known term of a leading manager: its number (epoch), and the store's history in which epochs count."""

    def __init__(self) -> None:
        self.history = ""  # empty: not yet known
        self.epoch = 0
        self._past_histories: deque[str] = deque(maxlen=MAX_PAST_HISTORIES)

    def has_replaced(self, history: str, epoch: int) -> bool:
        """Return whether the given term is over: its epoch is lower than the newest, or its history was replaced."""
        return epoch < self.epoch if self._is_same(history) else history in self._past_histories

    def set(self, history: str, epoch: int) -> None:
        if self.history and not self._is_same(history):
            self._past_histories.append(self.history)
        self.history, self.epoch = history or self.history, epoch

    def _is_same(self, history: str) -> bool:
        return not history or not self.history or history == self.history


class UpdateCursor(NewestTerm):
    """The newest term, and the revision up to which the term's updates were applied."""

    def __init__(self) -> None:
        super().__init__()
        self.revision = 0  # within the newest term; 0 requests a snapshot

    def receive(self, update: ManagerUpdate) -> UpdateVerdict:
        """Decide what to do with an update; if the update is accepted, advance the cursor."""
        if self.has_replaced(update.history, update.epoch):
            return UpdateVerdict.DEPOSED
        is_same = update.epoch == self.epoch and update.history == self.history
        if not update.is_snapshot and not (is_same and update.since == self.revision):
            self.revision = 0
            return UpdateVerdict.MISSED
        self.set(update.history, update.epoch)
        self.revision = update.revision
        return UpdateVerdict.ACCEPTED
