"""Records in memory, with revisions, compares, leases and the latest changes."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.core.errors import Compacted, Conflict, InvalidRequest, LeaseLost
from penstock.storage.metadata.metadata_store import (
    MAX_VALUE_BYTES,
    MAX_WRITES,
    Change,
    Compare,
    Record,
    Snapshot,
    Write,
)

MAX_CHANGES = 4096  # revisions that a watcher may lag behind


@dataclass(slots=True)
class HeldLease:
    ttl_s: float
    ends_at: float
    keys: set[str] = field(default_factory=set)


def check_size(writes: Sequence[Write]) -> None:
    size_bytes = sum(len(write.value or b"") + len(write.key) for write in writes)
    if len(writes) > MAX_WRITES or size_bytes > MAX_VALUE_BYTES:
        raise InvalidRequest(
            f"one change of the metadata store may write {MAX_WRITES} records with {MAX_VALUE_BYTES} bytes in all, "
            f"but this one has {len(writes)} records with {size_bytes} bytes: split it"
        )
    assert len({write.key for write in writes}) == len(writes), "one commit writes a key once"


class Records:
    def __init__(self, records: Iterable[Record] = (), revision: int = 0, max_changes: int = MAX_CHANGES) -> None:
        self._records = {record.key: record for record in records}
        self.revision = revision
        self._leases: dict[int, HeldLease] = {}
        self._lease_of: dict[str, int] = {}
        self._next_lease = 1
        self._changes: deque[tuple[Change, ...]] = deque(maxlen=max_changes)
        self._known_after = revision  # all changes after this revision are kept

    def get(self, key: str) -> Record | None:
        return self._records.get(key)

    def take_snapshot(self, prefix: str) -> Snapshot:
        found = sorted(key for key in self._records if key.startswith(prefix))
        return Snapshot(self.revision, tuple(self._records[key] for key in found))

    def is_leased(self, key: str) -> bool:
        return key in self._lease_of

    def plan(self, writes: Sequence[Write], compares: Sequence[Compare]) -> tuple[Change, ...]:
        """Return the changes that the writes make at the next revision. Deleting an absent record is not a change."""
        check_size(writes)
        for key, revision in compares:
            found = self._records.get(key)
            if (found.revision if found is not None else 0) != revision:
                raise Conflict(f"'{key}' was changed by somebody else in the meantime; read it again")
        for write in writes:
            if write.lease and write.lease not in self._leases:
                raise LeaseLost(f"lease {write.lease} has ended or never existed")
        is_real = [write for write in writes if write.value is not None or write.key in self._records]
        return tuple(Change(write.key, write.value, self.revision + 1) for write in is_real)

    def apply(self, changes: Sequence[Change], writes: Sequence[Write]) -> None:
        """Apply the changes that `plan` returned for these writes."""
        leases = {write.key: write.lease for write in writes}
        for change in changes:
            assert change.revision == self.revision + 1, "changes are applied before others are planned"
            self._detach_from_lease(change.key)
            if change.value is None:
                del self._records[change.key]
            else:
                self._records[change.key] = Record(change.key, change.value, change.revision)
                if lease := leases.get(change.key, 0):
                    self._leases[lease].keys.add(change.key)
                    self._lease_of[change.key] = lease
        if changes:
            self.revision += 1
            if len(self._changes) == self._changes.maxlen:
                self._known_after = self._changes[0][0].revision
            self._changes.append(tuple(changes))

    def list_changes_since(self, after: int) -> list[tuple[Change, ...]]:
        if after < self._known_after:
            raise Compacted(f"changes after revision {after} are no longer kept: read everything again")
        found: list[tuple[Change, ...]] = []
        for changes in reversed(self._changes):
            if changes[0].revision <= after:
                break
            found.append(changes)
        return found[::-1]

    # --- leases

    def grant(self, ttl_s: float, now: float) -> int:
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self._leases[lease] = HeldLease(ttl_s, now + ttl_s)
        return lease

    def keep_alive(self, lease: int, now: float) -> float:
        held = self._leases.get(lease)
        if held is None or held.ends_at <= now:
            raise LeaseLost(f"lease {lease} has ended or never existed")
        held.ends_at = now + held.ttl_s
        return held.ttl_s

    def plan_lease_end(self, lease: int) -> list[Write]:
        """Return the writes that delete a lease's records. Call `forget` after committing them."""
        held = self._leases.get(lease)
        return [Write(key, None, may_wait=True) for key in sorted(held.keys)] if held is not None else []

    def forget_lease(self, lease: int) -> None:
        held = self._leases.pop(lease, None)
        assert held is None or not held.keys, "the keys of a lease are deleted first"

    def list_ended_leases(self, now: float) -> list[int]:
        return [lease for lease, held in self._leases.items() if held.ends_at <= now]

    def find_next_lease_end(self) -> float | None:
        return min((held.ends_at for held in self._leases.values()), default=None)

    def _detach_from_lease(self, key: str) -> None:
        if lease := self._lease_of.pop(key, 0):
            self._leases[lease].keys.discard(key)
