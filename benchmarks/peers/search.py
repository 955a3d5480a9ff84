"""The search for the best setting of each server: all candidates under the same load, and the file with the results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from benchmarks.peers.peer import Setting
from benchmarks.peers.plan import Contender
from benchmarks.peers.results import Record


@dataclass(slots=True)
class Candidate:
    setting: str
    values: Mapping[str, Any]
    kind: str
    protocol: str
    rps: list[float] = field(default_factory=list)  # requests per second, one value per round
    p99_ms: list[float] = field(default_factory=list)
    failure: str = ""
    is_winner: bool = False

    @property
    def is_able(self) -> bool:
        return bool(self.rps) and not self.failure

    def is_of(self, setting: Setting | None) -> bool:
        if setting is None or self.setting != setting.name:
            return False
        return bool(self.values == json.loads(json.dumps(setting.values)))  # lists, as JSON files contain them


CANDIDATES = TypeAdapter(dict[str, dict[str, list[Candidate]]])  # by group and server


class Choice:
    """The measured candidates by group and server, with the winners marked."""

    def __init__(self, found: dict[str, dict[str, list[Candidate]]] | None = None) -> None:
        self.found = found or {}

    @classmethod
    def load(cls, file: Path) -> "Choice":
        if not file.exists():
            return cls()
        return cls(CANDIDATES.validate_json(file.read_bytes()))

    def save(self, file: Path) -> None:
        file.write_bytes(CANDIDATES.dump_json(self.found, indent=1) + b"\n")

    def winner(self, groups: Sequence[str], server: str, settings: Sequence[Setting]) -> Setting:
        """Return the fastest measured setting in these groups; the first setting if none was measured."""
        entries = [entry for group in groups for entry in self.found.get(group, {}).get(server, [])]

        def rate(setting: Setting) -> float:
            return max((median(entry.rps) for entry in entries if entry.is_able and entry.is_of(setting)), default=0.0)

        return max(settings, key=rate)

    def has(self, group: str, contender: Contender, rounds: int) -> bool:
        """Return whether the candidate was measured often enough without failures."""
        own = [one for one in self.found.get(group, {}).get(contender.server, []) if one.is_of(contender.setting)]
        return any(not candidate.failure and len(candidate.rps) >= rounds for candidate in own)

    def forget(self, group: str, server: str, keep: Sequence[Contender] = ()) -> None:
        """Remove all candidates that are not in `keep`."""
        entries = self.found.get(group, {}).get(server, [])
        self.found.setdefault(group, {})[server] = [
            entry for entry in entries if any(entry.is_of(contender.setting) for contender in keep)
        ]

    def add(self, contender: Contender, record: Record) -> None:
        assert contender.setting is not None
        entries = self.found.setdefault(record.group, {}).setdefault(record.server, [])
        entry = next((entry for entry in entries if entry.is_of(contender.setting)), None)
        if entry is None:
            setting = contender.setting
            entry = Candidate(setting.name, dict(setting.values), contender.kind, contender.protocols[0])
            entries.append(entry)
        entry.failure = record.failure
        if not record.failure:
            entry.rps.append(round(record.rows[0].rps, 2))
            entry.p99_ms.append(round(record.rows[0].p99_ms, 2))
        mark_winners(entries)


def mark_winners(entries: Sequence[Candidate]) -> None:
    """Mark the candidate with the most requests per second of each kind."""
    for entry in entries:
        entry.is_winner = False
    for kind in {entry.kind for entry in entries}:
        able = [entry for entry in entries if entry.kind == kind and entry.is_able]
        if able:
            max(able, key=lambda entry: median(entry.rps)).is_winner = True
