"""The metadata store's interface: records with revisions, atomic commits, watches and leases."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

CALL_S = 5.0  # deadline of a call, including its retries
MAX_WRITES = 100  # in one commit: etcd allows 128
MAX_VALUE_BYTES = 1024 * 1024  # of one commit: etcd allows 1.5 MiB


@dataclass(frozen=True, slots=True)
class Record:
    key: str
    value: bytes
    revision: int  # of the store at the record's last write


@dataclass(frozen=True, slots=True)
class Snapshot:
    revision: int  # of the store; watch for changes after it
    records: tuple[Record, ...]  # by key


@dataclass(frozen=True, slots=True)
class Change:
    key: str
    value: bytes | None  # None: deleted
    revision: int


@dataclass(frozen=True, slots=True)
class Write:
    key: str
    value: bytes | None  # None deletes
    lease: int = 0
    may_wait: bool = False  # if SQLite's disk cannot be written, apply the write in memory and store it later


class Compare(NamedTuple):
    key: str
    revision: int  # that the record must have; 0: the record must be absent


class MetadataStore(Protocol):
    """A store whose revisions never decrease, not even after a restart. A call raises StoreUnavailable on a timeout."""

    async def get(self, key: str) -> Record | None: ...

    async def list(self, prefix: str) -> Snapshot: ...

    async def put(self, key: str, value: bytes, expected: int | None = None, lease: int = 0) -> int:
        """Write a record and return its revision; raise Conflict if its old revision is not `expected` (0: absent)."""
        return await self.commit([Write(key, value, lease)], _build_compares(key, expected))

    async def delete(self, key: str, expected: int | None = None) -> int:
        return await self.commit([Write(key, None)], _build_compares(key, expected))

    async def commit(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> int:
        """Apply all writes or none; raise Conflict if a compare fails.

        Return the revision of the change, or an earlier revision if nothing changed.
        """
        ...

    def watch(self, prefix: str, after: int) -> AsyncIterator[Sequence[Change]]:
        """Yield the changes of each later revision in order. Raise Compacted if changes are no longer kept."""
        ...

    async def grant(self, ttl_s: float) -> int:
        """Create a lease. Records that are written with the lease are deleted when the lease ends."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Renew a lease and return the seconds left; raise LeaseLost if it has ended."""
        ...

    async def revoke(self, lease: int) -> None: ...

    async def close(self) -> None: ...


def _build_compares(key: str, expected: int | None) -> list[Compare]:
    return [] if expected is None else [Compare(key, expected)]
