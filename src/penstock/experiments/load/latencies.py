"""Latencies in a high-resolution histogram, which is compact and can be merged with other histograms."""

from collections.abc import Iterable
from typing import Any

from hdrh.histogram import HdrHistogram

MAX_LATENCY_US = 3_600_000_000
DIGITS = 3  # significant digits
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


class Latencies:
    """A histogram of latencies, given in seconds and stored in whole microseconds."""

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self._histogram: Any = HdrHistogram(1, MAX_LATENCY_US, DIGITS)
        for value in seconds:
            self.record(value)

    def record(self, seconds: float, count: int = 1) -> None:
        self._histogram.record_value(min(MAX_LATENCY_US, max(1, round(seconds * 1e6))), count)

    def add(self, other: "Latencies") -> None:
        self._histogram.add(other._histogram)

    def __len__(self) -> int:
        return int(self._histogram.total_count)

    def percentile_ms(self, percent: float) -> float:
        return float(self._histogram.get_value_at_percentile(percent)) / 1000 if len(self) else float("nan")

    @property
    def highest_ms(self) -> float:
        return float(self._histogram.get_max_value()) / 1000 if len(self) else float("nan")

    def summary_ms(self) -> dict[str, float]:
        """Return the mean, p50 … p99.9 and the maximum in milliseconds."""
        if not len(self):
            return dict.fromkeys(("mean", *map(_percentile_name, PERCENTILES), "max"), float("nan"))
        found = self._histogram.get_percentile_to_value_dict(PERCENTILES)
        percentiles = {_percentile_name(percent): float(found[percent]) / 1000 for percent in PERCENTILES}
        return {"mean": float(self._histogram.get_mean_value()) / 1000, **percentiles, "max": self.highest_ms}

    def encode(self) -> str:
        """Return HdrHistogram's compressed form, which HdrHistogram's libraries in other languages can read."""
        return bytes(self._histogram.encode()).decode("ascii")

    @classmethod
    def decode(cls, text: str) -> "Latencies":
        found = cls()
        found._histogram.decode_and_add(text)
        return found


def _percentile_name(percent: float) -> str:
    return f"p{percent:g}"


def merge(parts: Iterable[Latencies]) -> Latencies:
    whole = Latencies()
    for part in parts:
        whole.add(part)
    return whole
