"""The ceiling of the text loads: the rate of the bare engine in this process, without a server."""

import sys
from functools import partial
from pathlib import Path

from benchmarks.peers.items import list_items
from benchmarks.peers.plan import LoadLevel, PeerTurn
from benchmarks.peers.results import Record, WindowRow
from benchmarks.suite.ceiling import Schedule, find_best_schedule, measure_warm_rate

TEXTS = 512


class Ceilings:
    def __init__(self, model: Path) -> None:
        self._model = model
        self._schedules: dict[str, Schedule] = {}  # the best schedule by load, searched once

    def perform(self, turn: PeerTurn) -> Record:
        levels = {level.load: level for level in turn.group.levels}
        return turn.record([WindowRow(load, "", 0, self._rps(level)) for load, level in levels.items()])

    def _rps(self, level: LoadLevel) -> float:
        texts = list_items(level.load)[:TEXTS]
        if level.load not in self._schedules:
            say = partial(print, file=sys.stderr, flush=True)
            self._schedules[level.load] = find_best_schedule(self._model, texts, level.seconds / 2, say)
        return measure_warm_rate(self._model, self._schedules[level.load], texts, level.seconds)
