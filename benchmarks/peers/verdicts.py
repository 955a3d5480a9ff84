"""Compares Penstock with the best peer: ratios, and the required minimum ("bar") of each ratio."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.peers.plan import BY_HAND, CEILING, GROUPS, MIXED, OFFERED, PENSTOCK, QUERIES, SHARES, TENSOR
from benchmarks.peers.results import WindowRow
from benchmarks.peers.summary import SummaryLine

THROUGHPUT, P99 = "requests/s", "p99"
ANY = "any"
# Compare equal protocols, then the best protocol of each server. Only Penstock has streams.
SCOPES = ("rest", "grpc", ANY)
UNARY = ("rest", "grpc")


@dataclass(frozen=True, slots=True)
class VerdictBar:
    value: float
    is_strict: bool = False  # the value itself is not enough


# By group, load, concurrency and figure.
BARS = {
    **{("minilm", MIXED, callers, THROUGHPUT): VerdictBar(1.1) for callers in (8, 32, 64)},
    **{("minilm", MIXED, callers, P99): VerdictBar(0.9) for callers in (8, 32, 64)},
    ("minilm", QUERIES, 64, THROUGHPUT): VerdictBar(2.0),
    **{("minilm-best", MIXED, callers, THROUGHPUT): VerdictBar(2.0) for callers in (8, 32, 64)},
    ("minilm-best", QUERIES, 64, THROUGHPUT): VerdictBar(2.0),
    **{
        ("open", f"{MIXED} at {share:.0%}", 64, P99): VerdictBar(bar)
        for share, bar in zip(SHARES, (1.0, 1.0, 0.9), strict=True)
    },
    ("noop", TENSOR, 32, THROUGHPUT): VerdictBar(1.0, is_strict=True),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    figure: str
    scope: str
    ratio: float  # of the medians
    low: float  # of single rounds
    high: float
    ours: SummaryLine
    best: SummaryLine
    bar: VerdictBar | None

    @property
    def outcome(self) -> str:
        if self.bar is None:
            is_ahead = self.ratio > 1 if self.figure == THROUGHPUT else self.ratio < 1
            return "ahead" if is_ahead else "behind"
        is_met = self.ratio >= self.bar.value if self.figure == THROUGHPUT else self.ratio <= self.bar.value
        if self.bar.is_strict and self.ratio == self.bar.value:
            is_met = False
        return "met" if is_met else "MISSED"


def judge(lines: Sequence[SummaryLine]) -> list[Verdict]:
    """Return a verdict for each window in which Penstock and a peer were measured, in the order of the groups."""
    return [verdict for window in _group_windows(lines) for verdict in _judge_window(window)]


def _group_windows(lines: Sequence[SummaryLine]) -> Iterator[list[SummaryLine]]:
    found: dict[tuple[str, str, int], list[SummaryLine]] = {}
    for line in lines:
        if line.server != CEILING:
            found.setdefault((line.group, line.load, line.concurrency), []).append(line)
    order = [(group.name, level.name, level.concurrency) for group in GROUPS for level in group.levels]
    yield from (found[key] for key in order if key in found)


def _judge_window(window: Sequence[SummaryLine]) -> Iterator[Verdict]:
    for kind in ("", OFFERED, BY_HAND):
        for scope in SCOPES:
            protocols = UNARY if scope == ANY else (scope,)
            ours = [line for line in window if line.server == PENSTOCK and line.protocol in protocols]
            peers = [
                line for line in window if line.server != PENSTOCK and line.kind == kind and line.protocol in protocols
            ]
            if ours and peers:
                # One row of ours for both figures: not one protocol's throughput with another one's latency.
                mine = max(ours, key=lambda line: line.rps)
                yield _compare(mine, max(peers, key=lambda line: line.rps), scope, THROUGHPUT)
                yield _compare(mine, min(peers, key=lambda line: line.p99_ms), scope, P99)


def _compare(ours: SummaryLine, best: SummaryLine, scope: str, figure: str) -> Verdict:
    def value(row: WindowRow) -> float:
        return row.rps if figure == THROUGHPUT else row.p99_ms

    mine, other = (median(value(row) for row in line.rows.values()) for line in (ours, best))
    rounds = [value(ours.rows[number]) / value(best.rows[number]) for number in ours.rows.keys() & best.rows.keys()]
    ratio = mine / other
    low, high = min([*rounds, ratio]), max([*rounds, ratio])
    bar = BARS.get((ours.group, ours.load, ours.concurrency, figure))
    return Verdict(figure, scope, ratio, low, high, ours, best, bar)
