"""The metadata store: keys with revisions, changed all or none, watched, and some of them kept only by a lease."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

CALL_S = 5.0  # what a call has in all, whatever fails within it
MAX_WRITES = 100  # in one commit: etcd takes 128
MAX_VALUE_BYTES = 1024 * 1024  # of one commit: etcd takes 1.5 MiB


@dataclass(frozen=True, slots=True)
class Record:
    key: str
    value: bytes
    revision: int  # the store's, when it was last written


@dataclass(frozen=True, slots=True)
class Snapshot:
    revision: int  # of the store: watch after it
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
    may_wait: bool = False  # where SQLite's disk cannot be written it is true for this life, and written later


class Compare(NamedTuple):
    key: str
    revision: int  # that the record must have; 0: it must be absent


class MetadataStore(Protocol):
    """Revisions never go back, also over restarts. A call that is not done in time raises StoreUnavailable."""

    async def get(self, key: str) -> Record | None: ...

    async def list(self, prefix: str) -> Snapshot: ...

    async def put(self, key: str, value: bytes, expected: int | None = None, lease: int = 0) -> int:
        """Returns the new revision. Raises Conflict where the record has not the expected one (0: is there)."""
        return await self.commit([Write(key, value, lease)], _expecting(key, expected))

    async def delete(self, key: str, expected: int | None = None) -> int:
        return await self.commit([Write(key, None)], _expecting(key, expected))

    async def commit(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> int:
        """All or none; raises Conflict. Returns the revision of the change; where nothing changed, an earlier one."""
        ...

    def watch(self, prefix: str, after: int) -> AsyncIterator[Sequence[Change]]:
        """One item a revision, in order, none lost; raises Compacted where that is not possible: list again."""
        ...

    async def grant(self, ttl_s: float) -> int:
        """A lease: what is written under it is deleted when it ends."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Seconds left; raises LeaseLost."""
        ...

    async def revoke(self, lease: int) -> None: ...

    async def close(self) -> None: ...


def _expecting(key: str, expected: int | None) -> list[Compare]:
    return [] if expected is None else [Compare(key, expected)]
