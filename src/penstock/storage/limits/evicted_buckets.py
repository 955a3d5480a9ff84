"""The buckets of callers that were removed because there were too many: a table of bounded size. Pure: no I/O.

A row is a hash and the value of one bucket: 16 bytes. A bucket may be in one of WAYS rows. If all these rows hold other
buckets, the bucket that is full again first is dropped, so that a nearly empty bucket stays in the table.
"""

from array import array
from collections.abc import Iterable, Mapping

ROWS = 1 << 21  # 32 MiB
WAYS = 8
MASK = (1 << 64) - 1


class EvictedBuckets:
    def __init__(self, rows: int = ROWS) -> None:
        """Create an empty table; memory is allocated when the first bucket is stored."""
        self._rows = rows
        self._hashes = array("Q")
        self._until = array("d")

    def __bool__(self) -> bool:
        """Return whether a bucket was ever stored."""
        return bool(self._hashes)

    def put(self, key: str, full_at: Mapping[str, float], now: float) -> None:
        """Store when a caller's buckets will be full again, by the names of their rates; leave out full buckets."""
        if not self._hashes:
            self._hashes.frombytes(bytes(8 * self._rows))
            self._until.frombytes(bytes(8 * self._rows))
        for name, value in full_at.items():
            if value > now:
                self._put_bucket(_compute_hash(key, name), value)

    def get(self, key: str, names: Iterable[str]) -> dict[str, float]:
        """Return the values of the caller's buckets that are in the table."""
        found = {}
        for name in names:
            wanted = _compute_hash(key, name)
            row = self._find_row(wanted)
            if self._hashes[row] == wanted:
                found[name] = self._until[row]
        return found

    def _put_bucket(self, bucket_hash: int, value: float) -> None:
        row = self._find_row(bucket_hash)
        if self._hashes[row] == bucket_hash or value > self._until[row]:
            self._hashes[row], self._until[row] = bucket_hash, value

    def _find_row(self, bucket_hash: int) -> int:
        """Return the row of a bucket or, if the table lacks it, the row that it may replace."""
        first = bucket_hash % (self._rows // WAYS) * WAYS
        rows = range(first, first + WAYS)
        for row in rows:
            if self._hashes[row] == bucket_hash:
                return row
        return min(rows, key=self._until.__getitem__)


def _compute_hash(key: str, name: str) -> int:
    return hash((key, name)) & MASK or 1  # text hashes differ in each process, so that callers cannot predict a row
