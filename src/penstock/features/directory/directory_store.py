"""The protocol of a store of the directory's records."""

from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol

from penstock.features.directory.directory_query import Test
from penstock.features.directory.json_values import Document

Kind = Literal["servers", "clusters"]
KINDS: tuple[Kind, ...] = ("servers", "clusters")


@dataclass(frozen=True, slots=True)
class DirectoryRecord:
    """A registered document. Times are seconds since 1970."""

    record_id: str
    document: Document
    owner: str = ""  # the id of the key that registered the record; empty: no key was required
    expires_at: float = inf  # the end of the lease
    revision: int = 1  # rises with each change


@dataclass(frozen=True, slots=True)
class RecordSearch:
    """A validated query, in MongoDB's language and as a function."""

    query: Document
    test: Test
    now: float  # records whose lease has ended are left out
    after: str = ""  # only records with a higher id
    limit: int = 1000


class DirectoryStore(Protocol):
    """Stores records. A change names the revision that it replaces, and fails if the record has another revision."""

    async def get(self, record_kind: Kind, record_id: str) -> DirectoryRecord | None: ...

    async def put(self, record_kind: Kind, record: DirectoryRecord, replaces: int) -> bool:
        """Write a record if the stored revision is `replaces` (0: none is stored); return whether it was written."""
        ...

    async def delete(self, record_kind: Kind, record_id: str, revision: int) -> bool: ...

    async def find(self, record_kind: Kind, search: RecordSearch) -> list[DirectoryRecord]:
        """Return the matching records by id."""
        ...

    async def count(self, record_kind: Kind) -> int: ...

    async def remove_expired(self, now: float) -> int:
        """Delete the records whose lease has ended; return their number."""
        ...

    async def close(self) -> None: ...
