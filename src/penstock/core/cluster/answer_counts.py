"""A gateway's counts of a block's answers, errors and latencies, by which a rollout compares two versions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2

FIRST_BOUND_S = 0.0001  # the upper bound of the first bucket
BUCKETS_PER_DOUBLING = 4  # buckets; each bucket's upper bound is 19% above its lower bound
BUCKET_COUNT = 81  # the last bucket begins at 88 seconds and has no upper bound


def find_bucket(seconds: float) -> int:
    if seconds <= FIRST_BOUND_S:
        return 0
    return min(BUCKET_COUNT - 1, 1 + int(BUCKETS_PER_DOUBLING * log2(seconds / FIRST_BOUND_S)))


def compute_upper_bound_s(bucket: int) -> float:
    """Return the upper bound of a latency bucket in seconds; the last bucket is treated as if it had a bound, too."""
    return float(FIRST_BOUND_S * 2 ** (bucket / BUCKETS_PER_DOUBLING))


@dataclass(slots=True)
class AnswerCounts:
    """Counts of a block's requests since the gateway's last report to the manager; `waiting` is the current state."""

    block_id: str
    answers: int = 0  # that clients got, including cached and shared answers
    errors: dict[str, int] = field(default_factory=dict)  # by code
    latencies: dict[int, int] = field(default_factory=dict)  # of requests that workers ran, by bucket
    waiting: dict[int, int] = field(default_factory=dict)  # unfinished requests, by the bucket of their age
    is_control: bool = False  # counts only requests that directly followed a request for the compared block

    @property
    def outcomes(self) -> int:
        return self.answers + sum(self.errors.values())


def compute_quantile_s(latencies: Mapping[int, int], quantile: float) -> float | None:
    """Return the latency that a `quantile` of the requests did not exceed; None if there are no latencies."""
    total = sum(latencies.values())
    if not total:
        return None
    wanted, seen = quantile * total, 0
    for bucket in sorted(latencies):
        count = latencies[bucket]
        if seen + count >= wanted and count:
            below = compute_upper_bound_s(bucket - 1) if bucket else 0.0
            return below + (compute_upper_bound_s(bucket) - below) * max(0.0, wanted - seen) / count
        seen += count
    return compute_upper_bound_s(BUCKET_COUNT - 1)
