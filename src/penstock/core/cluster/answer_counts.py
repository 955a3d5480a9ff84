"""A gateway's counts of a block's outcomes and latencies, from which rollouts compare blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2

FIRST_S = 0.0001  # the upper bound of the first bucket
PER_DOUBLING = 4  # buckets; each bucket's upper bound is 19% above its lower bound
BUCKETS = 81  # the last bucket begins at 88 seconds and has no upper bound


def bucket_of(seconds: float) -> int:
    if seconds <= FIRST_S:
        return 0
    return min(BUCKETS - 1, 1 + int(PER_DOUBLING * log2(seconds / FIRST_S)))


def upper_bound_s(bucket: int) -> float:
    """Return the upper bound of a bucket; for the last bucket, the value at which a next bucket would begin."""
    return float(FIRST_S * 2 ** (bucket / PER_DOUBLING))


@dataclass(slots=True)
class AnswerCounts:
    """Counts since the last report, except `waiting`, which is current."""

    block_id: str
    answers: int = 0  # that clients got, including cached and shared answers
    errors: dict[str, int] = field(default_factory=dict)  # by code
    latencies: dict[int, int] = field(default_factory=dict)  # of requests that workers ran, by bucket
    waiting: dict[int, int] = field(default_factory=dict)  # unfinished requests, by the bucket of their age
    is_control: bool = False  # only requests are counted that came right after a request of the compared block

    @property
    def outcomes(self) -> int:
        return self.answers + sum(self.errors.values())


def quantile_s(latencies: Mapping[int, int], share: float) -> float | None:
    """Return a quantile, interpolated within its bucket; None if there are no latencies."""
    total = sum(latencies.values())
    if not total:
        return None
    wanted, seen = share * total, 0
    for bucket in sorted(latencies):
        count = latencies[bucket]
        if seen + count >= wanted and count:
            below = upper_bound_s(bucket - 1) if bucket else 0.0
            return below + (upper_bound_s(bucket) - below) * max(0.0, wanted - seen) / count
        seen += count
    return upper_bound_s(BUCKETS - 1)
