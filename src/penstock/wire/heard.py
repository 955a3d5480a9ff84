"""How far somebody has heard a manager, and which of its messages follow. Decides; never acts."""

from collections import deque
from enum import Enum
from typing import Protocol

MAX_PAST = 16


class ManagerMessage(Protocol):
    """The part of an Assignment or a ClusterView that says where it belongs."""

    history: str
    epoch: int
    revision: int
    is_snapshot: bool
    since: int


class Verdict(Enum):
    TAKEN = "taken"  # fold it
    MISSED = "missed"  # something before it was not heard: ask for everything
    DEPOSED = "deposed"  # it is of an older epoch than the newest that was heard: do not obey


class Newest:
    """The newest reign that is known: its epoch, and the history of the metadata store that epochs are counted in."""

    def __init__(self) -> None:
        self.history = ""  # empty: nobody has told
        self.epoch = 0
        self._past: deque[str] = deque(maxlen=MAX_PAST)

    def outlives(self, history: str, epoch: int) -> bool:
        """Whether that reign is over: of an earlier epoch, or of a history that was left for another."""
        return epoch < self.epoch if self._is_same(history) else history in self._past

    def becomes(self, history: str, epoch: int) -> None:
        if self.history and not self._is_same(history):
            self._past.append(self.history)
        self.history, self.epoch = history or self.history, epoch

    def _is_same(self, history: str) -> bool:
        return not history or not self.history or history == self.history


class Heard(Newest):
    def __init__(self) -> None:
        super().__init__()
        self.revision = 0  # of that epoch; 0: everything is wanted

    def hear(self, told: ManagerMessage) -> Verdict:
        if self.outlives(told.history, told.epoch):
            return Verdict.DEPOSED
        is_same = told.epoch == self.epoch and told.history == self.history
        if not told.is_snapshot and not (is_same and told.since == self.revision):
            self.revision = 0
            return Verdict.MISSED
        self.becomes(told.history, told.epoch)
        self.revision = told.revision
        return Verdict.TAKEN
