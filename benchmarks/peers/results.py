"""What was measured, turn by turn, and the JSON file that holds it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class WindowRow:
    """One window."""

    load: str
    protocol: str
    concurrency: int
    rps: float
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    rejected: dict[str, int] = field(default_factory=dict)  # by status
    cpu_ms: float = 0.0  # of all the server's processes, a request
    memory_mib: float = 0.0
    generator_share: float = 0.0  # of the one core that the load generator can use


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
    refusal: str = ""  # it does not serve this, which is no failure


@dataclass(slots=True)
class PeerResults:
    scale: float  # of the windows; figures of different scales are not put together
    records: list[Record] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(".part")
        whole.write_text(json.dumps(asdict(self), indent=1) + "\n")
        whole.replace(file)  # an interrupted run leaves the turn before, not half a file

    @classmethod
    def load(cls, file: Path) -> "PeerResults":
        found = json.loads(file.read_text())
        return cls(found["scale"], [read_record(entry) for entry in found["records"]], found["machine"])


def read_record(found: dict[str, Any]) -> Record:
    return Record(**{**found, "rows": [WindowRow(**row) for row in found["rows"]]})
