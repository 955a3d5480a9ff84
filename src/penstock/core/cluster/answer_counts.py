"""What a gateway counts of a block's answers, for who compares blocks: outcomes, and latencies in fixed buckets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2

FIRST_S = 0.0001  # the upper bound of the first bucket
PER_DOUBLING = 4  # so a bucket's upper bound is 19% above its lower one
BUCKETS = 81  # the last begins at 88 seconds and has no end


def bucket_of(seconds: float) -> int:
    if seconds <= FIRST_S:
        return 0
    return min(BUCKETS - 1, 1 + int(PER_DOUBLING * log2(seconds / FIRST_S)))


def upper_bound_s(bucket: int) -> float:
    """Of the last one it is where the next would begin."""
    return float(FIRST_S * 2 ** (bucket / PER_DOUBLING))


@dataclass(slots=True)
class AnswerCounts:
    """Since the last report, but for what waits now."""

    block_id: str
    answers: int = 0  # that clients got, kept ones and those of others too
    errors: dict[str, int] = field(default_factory=dict)  # by code
    latencies: dict[int, int] = field(default_factory=dict)  # of what workers ran, by bucket
    waiting: dict[int, int] = field(default_factory=dict)  # of what is inside now, by the bucket of its age
    is_control: bool = False  # of those alone that came right after one for the block it is compared with

    @property
    def outcomes(self) -> int:
        return self.answers + sum(self.errors.values())


def quantile_s(latencies: Mapping[int, int], share: float) -> float | None:
    """As if latencies lay evenly within their bucket; None: there are none."""
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
