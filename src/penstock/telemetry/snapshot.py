"""What the metrics say at one moment, process by process: read from the server's shared folder, cheaply.

The library's own collector adds the processes up and builds an object for each sample. A live view wants each worker
by itself and reads every second, so this reads the same files and keeps what it has once parsed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from prometheus_client.mmap_dict import MmapedDict

Labels = frozenset[tuple[str, str]]


class Series(NamedTuple):
    """One line of figures: a metric's name, with `_total`, `_bucket` or `_sum` behind it, and its labels."""

    name: str
    labels: Labels = frozenset()


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    counts: Mapping[Series, float] = field(default_factory=dict)  # only grow; a bucket counts its own, not those below
    gauges: Mapping[Series, float] = field(default_factory=dict)


Snapshot = Mapping[str, ProcessFigures]  # by the name that the process shares its metrics under


class SnapshotReader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parsed: dict[str, Series] = {}

    def read(self) -> Snapshot:
        found: dict[str, tuple[dict[Series, float], dict[Series, float]]] = {}
        parsed: dict[str, Series] = {}
        for file in self._folder.glob("*.db"):
            *kind, process = file.stem.split("_")  # counter, histogram or gauge_<mode>
            counts, gauges = found.setdefault(process, ({}, {}))
            self._read_file(file, gauges if kind[0] == "gauge" else counts, parsed)
        self._parsed = parsed  # so that what is gone is forgotten
        return {process: ProcessFigures(*figures) for process, figures in found.items()}

    def _read_file(self, file: Path, figures: dict[Series, float], parsed: dict[str, Series]) -> None:
        try:
            for key, value, _, _ in MmapedDict.read_all_values_from_file(str(file)):
                series = parsed[key] = self._parsed.get(key) or _parse(key)
                figures[series] = value
        except FileNotFoundError:
            return  # the process died just now, and its gauges left with it


def _parse(key: str) -> Series:
    _, name, labels, _ = json.loads(key)
    return Series(name, frozenset(labels.items()))
