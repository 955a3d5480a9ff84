"""The bare in-process ceiling: what the engine gives without a server, for the text loads."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.items import items
from benchmarks.peers.plan import CEILING, LoadLevel, PeerTurn
from benchmarks.peers.results import Record, WindowRow
from benchmarks.suite.ceiling import EmbedCeiling, Schedule

# Tried once for each load; the fastest is the ceiling.
SCHEDULES = (Schedule(256, 2, 1), Schedule(512, 2, 1), Schedule(1024, 2, 1), Schedule(512, 1, 2))
TEXTS = 512


class Ceilings:
    def __init__(self, model: Path) -> None:
        self._model = model
        self._schedules: dict[str, Schedule] = {}  # by load

    def perform(self, turn: PeerTurn) -> Record:
        levels = {level.load: level for level in turn.group.levels}
        rows = [WindowRow(load, "", 0, self._rps(level)) for load, level in levels.items()]
        return Record(turn.group.name, turn.number, CEILING, "", turn.contender.title, "", rows)

    def _rps(self, level: LoadLevel) -> float:
        texts = items(level.load)[:TEXTS]
        if level.load not in self._schedules:
            rates = {schedule: self._run(schedule, texts, level.seconds / 2) for schedule in SCHEDULES}
            self._schedules[level.load] = max(rates, key=lambda schedule: rates[schedule])
        return self._run(self._schedules[level.load], texts, level.seconds)

    def _run(self, schedule: Schedule, texts: Sequence[str], seconds: float) -> float:
        ceiling = EmbedCeiling(self._model, schedule)
        ceiling.run(texts[:64], 0.0)
        rps = ceiling.run(texts, seconds)
        ceiling.close()
        return rps
