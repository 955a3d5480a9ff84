"""How far somebody has heard a manager, and which of its messages follow. Decides; never acts."""

from enum import Enum
from typing import Protocol


class ManagerMessage(Protocol):
    """The part of an Assignment or a ClusterView that says where it belongs."""

    epoch: int
    revision: int
    is_snapshot: bool
    since: int


class Verdict(Enum):
    TAKEN = "taken"  # fold it
    MISSED = "missed"  # something before it was not heard: ask for everything
    DEPOSED = "deposed"  # it is of an older epoch than the newest that was heard: do not obey


class Heard:
    def __init__(self) -> None:
        self.epoch = 0
        self.revision = 0  # of that epoch; 0: everything is wanted

    def hear(self, told: ManagerMessage) -> Verdict:
        if told.epoch < self.epoch:
            return Verdict.DEPOSED
        if not told.is_snapshot and (told.epoch != self.epoch or told.since != self.revision):
            self.revision = 0
            return Verdict.MISSED
        self.epoch, self.revision = told.epoch, told.revision
        return Verdict.TAKEN
