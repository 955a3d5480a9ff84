"""Snapshots of all metrics per process, read from the server's shared folder.

prometheus_client's collector adds up all processes and builds an object for each sample. The live view needs each
process separately every second, so this module reads the same files itself and caches parsed keys.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.telemetry.prometheus_internals import read_values

Labels = frozenset[tuple[str, str]]


class Series(NamedTuple):
    """A time series: a metric's name, with suffix `_total`, `_bucket` or `_sum`, and its labels."""

    name: str
    labels: Labels = frozenset()


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    counts: Mapping[Series, float] = field(default_factory=dict)  # counters; buckets are not cumulative
    gauges: Mapping[Series, float] = field(default_factory=dict)


Snapshot = Mapping[str, ProcessFigures]  # by the process's name in `share_metrics`


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
        self._parsed = parsed  # without keys that no longer exist
        return {process: ProcessFigures(*figures) for process, figures in found.items()}

    def _read_file(self, file: Path, figures: dict[Series, float], parsed: dict[str, Series]) -> None:
        try:
            for key, value in read_values(file):
                series = parsed[key] = self._parsed.get(key) or _parse_key(key)
                figures[series] = value
        except FileNotFoundError:
            return  # the process has just ended, and its gauges were removed


def _parse_key(key: str) -> Series:
    _, name, labels, _ = json.loads(key)
    return Series(name, frozenset(labels.items()))
