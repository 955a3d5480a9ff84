"""What a store of cached answers has counted since it started."""

from dataclasses import dataclass


@dataclass(slots=True)
class StoreCounts:
    entries: int = 0
    size_bytes: int = 0
    evicted_by_size: int = 0
    evicted_by_ttl: int = 0
    errors: int = 0  # calls that failed or were late, or were not tried because the store is away
    dropped: int = 0  # writes that found the buffer full
