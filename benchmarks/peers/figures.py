"""Named figures of a run: Penstock compared with one peer, as ratios of medians of the same rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.plan import PENSTOCK, TENSOR
from benchmarks.peers.summary import SummaryLine
from benchmarks.peers.verdicts import ANY, P99, judge


@dataclass(frozen=True, slots=True)
class NamedRatio:
    """The ratio of requests per second to one peer's, over the same protocol."""

    group: str
    load: str
    callers: int
    protocol: str
    peer: str
    bar: float


NAMED = {
    "noop_grpc_over_triton": NamedRatio("noop", TENSOR, 32, "grpc", "triton", 0.7),
    "noop_rest_over_triton": NamedRatio("noop", TENSOR, 32, "rest", "triton", 0.8),
}


OPEN = "open_p99_over_peer"  # at each share of the peak rate


@dataclass(frozen=True, slots=True)
class NamedFigure:
    value: float
    bar: float
    is_ceiling: bool = False


def compute_named_figures(lines: Sequence[SummaryLine]) -> dict[str, NamedFigure]:
    """Return the figures whose parts were measured."""
    found = {
        key: NamedFigure(value, ratio.bar)
        for key, ratio in NAMED.items()
        if (value := _compute_ratio(lines, ratio)) is not None
    }
    return found | _open_figures(lines)


def _open_figures(lines: Sequence[SummaryLine]) -> dict[str, NamedFigure]:
    found = {
        f"{OPEN}_{verdict.ours.load.split()[-1].rstrip('%')}": NamedFigure(
            round(verdict.ratio, 4), verdict.bar.value, is_ceiling=True
        )
        for verdict in judge(lines)
        if (verdict.ours.group, verdict.figure, verdict.scope) == ("open", P99, ANY) and verdict.bar is not None
    }
    if found:
        found[OPEN] = NamedFigure(round(max(each.value / each.bar for each in found.values()), 4), 1.0, is_ceiling=True)
    return found


def _compute_ratio(lines: Sequence[SummaryLine], ratio: NamedRatio) -> float | None:
    window = (ratio.group, ratio.load, ratio.callers, ratio.protocol)
    found = [line for line in lines if (line.group, line.load, line.concurrency, line.protocol) == window]
    ours = [line.rps for line in found if line.server == PENSTOCK]
    theirs = [line.rps for line in found if line.server == ratio.peer]
    return round(max(ours) / max(theirs), 4) if ours and theirs else None
