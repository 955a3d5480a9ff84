"""The figures that a run has by name: Penstock over one peer, each a ratio of medians of the same rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.plan import PENSTOCK, TENSOR
from benchmarks.peers.summary import SummaryLine


@dataclass(frozen=True, slots=True)
class NamedRatio:
    """Requests a second over one peer's, by the same protocol."""

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


def named_figures(lines: Sequence[SummaryLine]) -> dict[str, float]:
    """Of what was measured; the others are left out."""
    return {key: value for key, ratio in NAMED.items() if (value := _ratio(lines, ratio)) is not None}


def _ratio(lines: Sequence[SummaryLine], ratio: NamedRatio) -> float | None:
    window = (ratio.group, ratio.load, ratio.callers, ratio.protocol)
    found = [line for line in lines if (line.group, line.load, line.concurrency, line.protocol) == window]
    ours = [line.rps for line in found if line.server == PENSTOCK]
    theirs = [line.rps for line in found if line.server == ratio.peer]
    return round(max(ours) / max(theirs), 4) if ours and theirs else None
