"""What was changed in a cluster, and by whom: each change is written down with it, and the latest are kept."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from penstock.core.blocks import StoredValue
from penstock.core.error_text import shorten
from penstock.core.errors import Conflict
from penstock.manager.access.door import acting
from penstock.manager.desired import EVENTS, Folded, encode
from penstock.manager.events import newest
from penstock.manager.manager import Manager
from penstock.storage.metadata.base import Compare, MetadataStore, Write

log = structlog.get_logger()
AUDIT = "audit/"
MAX_ENTRIES = 5000  # that are kept
MAX_CHANGES = 16  # of one entry that are told in full
AHEAD = 64
ATTEMPTS = 5
MAX_CHARS = 4096  # of a value
SECRETS = "secrets/"  # what nobody is told
HIDDEN = ("digest", "rotated_digest")  # of a key


class AuditedChange(StoredValue):
    key: str
    before: str = ""  # JSON; empty: it was not there
    after: str = ""  # empty: it is gone


class AuditedCall(StoredValue):
    at: float  # seconds since 1970
    who: str
    what: str  # the method
    changes: tuple[AuditedChange, ...] = ()


class Audit:
    def __init__(self, manager: Manager, store: MetadataStore, clock: Callable[[], float] = time.time) -> None:
        self._manager = manager
        self._store = store
        self._clock = clock
        self._entries: dict[int, bytes] = {}  # in the order of their numbers
        self._newest = 0  # that was given: it may be on its way
        manager.store.audit = self.plan
        manager.on_folded.append(self._folded)
        self._take(manager.desired.others)

    async def plan(self, writes: Sequence[Write], ahead: int = 0) -> list[Write]:
        """What is written beside them; nothing where nobody asked for it, as in what the manager does by itself.
        `ahead`: numbers that are left to another who writes at the same time."""
        asked = acting.get()
        if asked is None:
            return []
        who, what = asked.principal.name, asked.method
        asked_for = [write for write in writes if not write.key.startswith(EVENTS)][:MAX_CHANGES]
        changes = [await self._change(write) for write in asked_for]
        log.info("audit", who=who, what=what, keys=[write.key for write in asked_for])
        entry = AuditedCall(at=self._clock(), who=who, what=what, changes=tuple(changes))
        number = self._newest = max(self._newest, next(reversed(self._entries), 0)) + 1 + ahead
        gone = list(self._entries)[: max(0, len(self._entries) + 1 - MAX_ENTRIES)][:MAX_CHANGES]
        may_wait = all(write.may_wait for write in writes)  # where the change itself does
        values = {number: encode(entry), **dict.fromkeys(gone)}
        return [Write(_key(each), value, may_wait=may_wait) for each, value in values.items()]

    def read(self, after: int = 0, limit: int = 100, who: str = "", before: int = 0) -> list[tuple[int, AuditedCall]]:
        """The newest of those that match, oldest first; `before`: only older ones."""
        return newest(self._entries, AuditedCall, lambda entry: who in ("", entry.who), after, limit, before)

    async def _change(self, write: Write) -> AuditedChange:
        before = await self._store.get(write.key)
        values = (before.value if before is not None else None, write.value)
        return AuditedChange(key=write.key, before=_told(write.key, values[0]), after=_told(write.key, values[1]))

    def _folded(self, folded: Folded) -> None:
        others = self._manager.desired.others
        self._take({key: others.get(key) for key in folded.others})

    def _take(self, changed: "dict[str, bytes] | dict[str, bytes | None]") -> None:
        for key in sorted(key for key in changed if key.startswith(AUDIT)):
            number, value = int(key.removeprefix(AUDIT)), changed[key]
            self._entries.pop(number, None)
            if value is not None:
                self._entries[number] = value


class AuditedStore:
    """A store for what every manager writes, whoever leads: with each commit and each deletion goes who asked for it.
    What is only put is on its way to one of these."""

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
            try:  # whoever leads does not look whether a number is used, and takes those before it
                return await self._store.commit([*writes, *planned], [*compares, Compare(entry, 0)])
            except Conflict:
                if await self._store.get(entry) is None:
                    raise
        return await self._store.commit(writes, compares)


def _key(number: int) -> str:
    return f"{AUDIT}{number:020}"


def _told(key: str, value: bytes | None) -> str:
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
