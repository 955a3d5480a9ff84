"""Summaries of the rounds of a window: medians and their spread."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.peers.results import Record, WindowRow
from penstock.models.convert.speed import spread

BUSY_GENERATOR = 0.7  # CPU share above which the load generator itself may limit the figures


@dataclass(slots=True)
class SummaryLine:
    """One contender over one protocol at one concurrency."""

    group: str
    load: str
    concurrency: int
    server: str
    kind: str
    title: str
    setting: str
    protocol: str
    rows: dict[int, WindowRow] = field(default_factory=dict)  # by round

    @property
    def rps(self) -> float:
        return median(row.rps for row in self.rows.values())

    @property
    def spread(self) -> float:
        return spread([row.rps for row in self.rows.values()])

    @property
    def p50_ms(self) -> float:
        return median(row.p50_ms for row in self.rows.values())

    @property
    def p99_ms(self) -> float:
        return median(row.p99_ms for row in self.rows.values())

    @property
    def cpu_ms(self) -> float:
        return median(row.cpu_ms for row in self.rows.values())

    @property
    def memory_mib(self) -> float:
        return max(row.memory_mib for row in self.rows.values())

    @property
    def notes(self) -> str:
        rejected: dict[str, int] = {}
        for row in self.rows.values():
            for status, count in row.rejected.items():
                rejected[status] = rejected.get(status, 0) + count
        found = [f"{count} refused with {status}" for status, count in rejected.items()]
        share = max(row.generator_share for row in self.rows.values())
        if share > BUSY_GENERATOR:
            found.append(f"load generator at {share:.0%} of a core")
        return ", ".join(found)


def summarize(records: Sequence[Record]) -> list[SummaryLine]:
    lines: dict[tuple[object, ...], SummaryLine] = {}
    for record in records:
        for row in record.rows:
            key = (record.group, row.load, row.concurrency, record.server, record.kind, record.setting, row.protocol)
            if key not in lines:
                group, load, concurrency, server, kind, setting, protocol = key
                lines[key] = SummaryLine(group, load, concurrency, server, kind, record.title, setting, protocol)
            lines[key].rows[record.number] = row
    return list(lines.values())


def list_absences(records: Sequence[Record], group: str) -> list[Record]:
    """Return the last failure or refusal of each contender of a group."""
    own = [one for one in records if one.group == group and (one.failure or one.refusal)]
    return list({(one.server, one.kind): one for one in own}.values())
