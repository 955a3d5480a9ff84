"""The audit log, which records each change that a caller requests, and keeps the latest entries."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from penstock.core.blocks import StoredValue
from penstock.core.error_text import shorten
from penstock.core.errors import Conflict
from penstock.endpoints.guarded_server import current_call
from penstock.manager.desired_state import EVENTS, StateChanges, encode
from penstock.manager.event_log import find_newest
from penstock.manager.feature import ManagerFeature
from penstock.storage.metadata.metadata_store import Compare, MetadataStore, Write

log = structlog.get_logger()
AUDIT = "audit/"
MAX_ENTRIES = 5000  # entries that the store keeps
MAX_CHANGES = 16  # recorded changes per entry
AHEAD = 64  # sequence numbers reserved for the leader, which does not check whether a number is used
ATTEMPTS = 5
MAX_CHARS = 4096  # of a recorded value
SECRETS = "secrets/"  # records whose values are hidden
HIDDEN = ("digest", "rotated_digest")  # fields of a key record that are hidden


class AuditedChange(StoredValue):
    key: str
    before: str = ""  # JSON; empty: the record did not exist
    after: str = ""  # empty: the record was deleted


class AuditedCall(StoredValue):
    at: float  # seconds since 1970
    who: str
    what: str  # the called method
    changes: tuple[AuditedChange, ...] = ()


class Audit(ManagerFeature):
    def __init__(self, store: MetadataStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._entries: dict[int, bytes] = {}  # by number, ascending
        self._newest = 0  # the last number that was used, even if its entry has not come back from the store

    async def plan(self, writes: Sequence[Write], ahead: int = 0) -> list[Write]:
        """Return the audit records of these writes; an empty list for the manager's own changes.

        `ahead`: sequence numbers reserved for a concurrent writer.
        """
        asked = current_call.get()
        if asked is None:
            return []
        who, what = asked.principal.name, asked.method
        requested = [write for write in writes if not write.key.startswith(EVENTS)][:MAX_CHANGES]
        changes = [await self._make_change(write) for write in requested]
        log.info("audit", who=who, what=what, keys=[write.key for write in requested])
        entry = AuditedCall(at=self._clock(), who=who, what=what, changes=tuple(changes))
        number = self._newest = max(self._newest, next(reversed(self._entries), 0)) + 1 + ahead
        excess = list(self._entries)[: max(0, len(self._entries) + 1 - MAX_ENTRIES)][:MAX_CHANGES]
        may_wait = all(write.may_wait for write in writes)
        values = {number: encode(entry), **dict.fromkeys(excess)}
        return [Write(_make_audit_key(each), value, may_wait=may_wait) for each, value in values.items()]

    def read(self, after: int = 0, limit: int = 100, who: str = "", before: int = 0) -> list[tuple[int, AuditedCall]]:
        """Return the newest matching entries, oldest first, numbered above `after` and, if given, below `before`."""
        return find_newest(self._entries, AuditedCall, lambda entry: who in ("", entry.who), after, limit, before)

    async def _make_change(self, write: Write) -> AuditedChange:
        before = await self._store.get(write.key)
        values = (before.value if before is not None else None, write.value)
        return AuditedChange(
            key=write.key,
            before=_format_visible_value(write.key, values[0]),
            after=_format_visible_value(write.key, values[1]),
        )

    def state_changed(self, state_changes: StateChanges) -> None:
        for key in sorted(key for key in state_changes.others if key.startswith(AUDIT)):
            number, value = int(key.removeprefix(AUDIT)), state_changes.others[key]
            self._entries.pop(number, None)
            if value is not None:
                self._entries[number] = value


class AuditedStore:
    """A store that adds an audit record to each commit and deletion; used by any manager, leading or not.

    A `put` is not audited, because it only prepares a commit.
    """

    def __init__(self, store: MetadataStore, audit: Audit) -> None:
        self._store = store
        self._audit = audit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def delete(self, key: str, expected: int | None = None) -> int:
        return await self.commit([Write(key, None)], [] if expected is None else [Compare(key, expected)])

    async def commit(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> int:
        for _ in range(ATTEMPTS):
            planned = await self._audit.plan(writes, AHEAD)
            if not planned:
                break
            entry = planned[0].key
            try:
                return await self._store.commit([*writes, *planned], [*compares, Compare(entry, 0)])
            except Conflict:
                if await self._store.get(entry) is None:
                    raise
        return await self._store.commit(writes, compares)


def _make_audit_key(number: int) -> str:
    return f"{AUDIT}{number:020}"


def _format_visible_value(key: str, value: bytes | None) -> str:
    """Return a record's value as the audit log shows it: JSON without secrets."""
    if value is None:
        return ""
    if key.startswith(SECRETS):
        return '"hidden"'
    try:
        found: Any = json.loads(value)
    except ValueError:
        return json.dumps(f"{len(value)} bytes")
    if isinstance(found, dict):
        found = {name: each for name, each in found.items() if name not in HIDDEN}
    text = json.dumps(found, separators=(",", ":"))
    return text if len(text) <= MAX_CHARS else json.dumps(shorten(text))
