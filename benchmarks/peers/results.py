"""Measurements of a run, turn by turn, and the JSON file that stores them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class WindowRow:
    """The measurements of one window."""

    load: str
    protocol: str
    concurrency: int
    rps: float
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    rejected: dict[str, int] = field(default_factory=dict)  # number of rejected requests by status
    cpu_ms: float = 0.0  # of all the server's processes, a request
    memory_mib: float = 0.0
    generator_share: float = 0.0  # CPU share of the load generator's core


@dataclass(frozen=True, slots=True)
class Record:
    """One turn of one contender."""

    group: str
    number: int  # of the round
    server: str
    kind: str
    title: str
    setting: str
    rows: list[WindowRow] = field(default_factory=list)
    failure: str = ""
    refusal: str = ""  # the server does not support the workload, which is no failure

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.group, self.server, self.kind, self.setting


@dataclass(slots=True)
class PeerResults:
    scale: float  # of the windows; figures of different scales are not put together
    records: list[Record] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)  # by name, of what is measured so far
    processors: dict[str, dict[str, str]] = field(default_factory=dict)  # by figure: what loads, and what computes

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(".part")
        whole.write_bytes(RESULTS.dump_json(self, indent=1) + b"\n")
        whole.replace(file)  # an interruption leaves the results of the previous turn

    @classmethod
    def load(cls, file: Path) -> "PeerResults":
        return RESULTS.validate_json(file.read_bytes())


RESULTS = TypeAdapter(PeerResults)
