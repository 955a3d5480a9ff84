"""The only uses of private parts of prometheus_client. A test fails if a new version changes these parts."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client import Histogram, values
from prometheus_client.mmap_dict import MmapedDict, mmap_key

__all__ = ["MappedValues", "add_observations", "bucket_bounds", "mmap_key", "read_values", "use_value_class"]


class MappedValues:
    """A file of metric values, mapped into memory."""

    def __init__(self, file: Path) -> None:
        self._mapped = MmapedDict(str(file))

    @property
    def capacity_bytes(self) -> int:
        return int(self._mapped._capacity)

    @property
    def used_bytes(self) -> int:
        return int(self._mapped._used)

    def __contains__(self, key: str) -> bool:
        return key in self._mapped._positions

    def fileno(self) -> int:
        return int(self._mapped._f.fileno())

    def read(self, key: str) -> float:
        return float(self._mapped.read_value(key)[0])

    def write(self, key: str, value: float) -> None:
        self._mapped.write_value(key, value, 0.0)

    def close(self) -> None:
        self._mapped.close()


def read_values(file: Path) -> Iterator[tuple[str, float]]:
    """Yield the keys and values in another process's file."""
    for key, value, _, _ in MmapedDict.read_all_values_from_file(str(file)):
        yield key, value


def use_value_class(value_class: type) -> None:
    """Set the class in which metrics that are created after this call store their values."""
    values.ValueClass = value_class


def bucket_bounds(histogram: Histogram) -> Sequence[float]:
    return histogram._upper_bounds


def add_observations(histogram: Histogram, counts: Sequence[int], total: float) -> None:
    """Add many observations, as numbers per bucket and a sum, because the public API adds only one at a time."""
    for index, count in enumerate(counts):
        if count:
            histogram._buckets[index].inc(count)
    if total:
        histogram._sum.inc(total)
