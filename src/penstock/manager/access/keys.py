"""The keys of a cluster, in its metadata store: made, revoked, rotated, and told to those who guard doors."""

import asyncio
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import structlog
from pydantic import ValidationError

from penstock.access.guard import Guard
from penstock.access.keys import KEY_BYTES, SECRET_BYTES, KeyChanges, KeyRecord, KeyTable, digest_of, key_text
from penstock.core.blocks import StoredValue
from penstock.core.cluster.access_view import AccessView
from penstock.core.errors import Conflict, InvalidRequest, NameTaken, NotFound
from penstock.core.principals import ANY_SCOPE, Principal
from penstock.manager.desired import Folded, encode
from penstock.manager.direct.signing import SIGNING, public_parts, signers_of
from penstock.manager.manager import Manager
from penstock.manager.reign import Reign
from penstock.manager.telling.etags import expecting
from penstock.storage.metadata.base import Compare, Write

log = structlog.get_logger()
KEYS, SECRET = "keys/", "secrets/cluster"
MAX_KEYS = 10_000
MANAGER = Principal("manager", scopes=ANY_SCOPE)  # another of this cluster


class ClusterSecret(StoredValue):
    """Made with the first key, where no setting says another."""

    secret: str  # base64


class MadeKey(NamedTuple):
    record: KeyRecord
    text: str


class Keys:
    """Used from the manager's event loop. What it knows it has from the store."""

    def __init__(
        self, manager: Manager, guard: Guard, secret: bytes = b"", clock: Callable[[], float] = time.time
    ) -> None:
        """`secret`: the cluster's, where it is not to lie in the store."""
        self._manager = manager
        self._guard = guard
        self._given = secret
        self._clock = clock
        self._records: dict[str, KeyRecord] = {}
        self._secret = secret
        # Until it is folded: a change of what was revoked meanwhile would bring it back.
        self._changing = asyncio.Lock()
        manager.managers_key = lambda: self.managers_key
        manager.on_folded.append(self._folded)
        manager.on_reign.append(self._tell)
        self._learn()

    # --- what operators ask

    async def create(self, wanted: KeyRecord) -> MadeKey:
        """`wanted` has what is asked for; its id and digest are given here."""
        async with self._changing:
            self._manager.check_leads()
            if any(each.name == wanted.name for each in self._records.values()):
                raise NameTaken(f"there is a key '{wanted.name}' already, or was: give another name, or rotate it")
            if len(self._records) >= MAX_KEYS:
                raise InvalidRequest(f"there are {MAX_KEYS} keys already, with those that were revoked")
            writes, compares, secret = self._secret_writes()
            made = self._made(wanted.model_copy(update={"key_id": f"key-{secrets.token_hex(6)}"}), secret)
            write, absent = _write(made.record), Compare(KEYS + made.record.key_id, 0)
            await self._manager.commit([*writes, write], [*compares, absent])
            self._manager.events.tell("key_created", made.record.name, f"for {', '.join(sorted(made.record.scopes))}")
            return made

    async def revoke(self, name: str, expected: str = "") -> KeyRecord:
        """`expected`, as in the others: a tag of what was read, of which the write must be the last."""
        async with self._changing:
            record = self.find(name)
            self._manager.check_leads()
            if record.revoked_at is None:
                record = record.model_copy(
                    update={"revoked_at": self._clock(), "rotated_digest": "", "rotated_until": 0.0}
                )
                await self._commit(record, expected)
                self._manager.events.tell("key_revoked", record.name, "it opens no door any more")
            return record

    async def change(self, name: str, changes: KeyChanges, expected: str = "") -> KeyRecord:
        """It keeps its text, its name and what of it is not said."""
        async with self._changing:
            record = self._unrevoked(name).model_copy(update=changes.given())
            await self._commit(record, expected)
            self._manager.events.tell("key_changed", record.name, f"now for {', '.join(sorted(record.scopes))}")
            return record

    async def rotate(self, name: str, grace_s: float, expected: str = "") -> MadeKey:
        """A new text; the one before goes on for a while."""
        async with self._changing:
            record = self._unrevoked(name)
            writes, unmade, secret = self._secret_writes()
            until = self._clock() + grace_s
            old = {"rotated_digest": record.digest, "rotated_until": until} if grace_s else {"rotated_digest": ""}
            made = self._made(record.model_copy(update={**old, "rotated_at": self._clock()}), secret)
            await self._commit(made.record, expected, writes, unmade)
            self._manager.events.tell("key_rotated", record.name, f"its old text goes on for {grace_s:g} s")
            return made

    def revision(self, record: KeyRecord) -> int:
        """Of its last write."""
        return self._manager.desired.revisions.get(KEYS + record.key_id, 0)

    def all(self) -> list[KeyRecord]:
        return sorted(self._records.values(), key=lambda record: record.name)

    def find(self, name: str) -> KeyRecord:
        """By its id or its name."""
        for record in self._records.values():
            if name in (record.key_id, record.name):
                return record
        raise NotFound(f"there is no key '{name[:128]}'; 'penstock key list' shows them")

    def is_revoked(self, key_id: str) -> bool:
        record = self._records.get(key_id)
        return record is not None and record.revoked_at is not None

    @property
    def managers_key(self) -> str:
        """What managers of this cluster show each other: whoever reads their store knows it."""
        return _derived(self._secret, b"managers").hex() if self._secret else ""

    # --- how it follows the store

    def _folded(self, folded: Folded) -> None:
        if SECRET in folded.others or any(key.startswith((KEYS, SIGNING)) for key in folded.others):
            self._learn()
            self._tell(self._manager.reign)

    def _learn(self) -> None:
        others, found = self._manager.desired.others, {}
        for key, value in others.items():
            if key.startswith(KEYS):
                try:
                    record = KeyRecord.model_validate_json(value)
                    found[record.key_id] = record
                except ValidationError as error:
                    log.warning("key_passed_over", key=key, error=error.errors()[0]["msg"])
        self._records = found
        if SECRET in others and not self._given:
            self._secret = b64decode(ClusterSecret.model_validate_json(others[SECRET]).secret)
        self._guard.keys_changed(self._table())

    def _table(self) -> KeyTable:
        own = {self.managers_key: MANAGER} if self._secret else {}
        return KeyTable(_derived(self._secret, b"digests"), self._records.values(), bool(self._records), own)

    def _tell(self, reign: Reign) -> None:
        secret = _derived(self._secret, b"digests")
        known = {key_id: encode(record) for key_id, record in self._records.items()}
        signers = public_parts(signers_of(self._manager.desired.others))
        revoked = frozenset(key_id for key_id, record in self._records.items() if record.revoked_at is not None)
        reign.set_access(AccessView(secret, bool(known), known, signers, revoked))

    # --- what the above is made of

    def _unrevoked(self, name: str) -> KeyRecord:
        record = self.find(name)
        self._manager.check_leads()
        if record.revoked_at is not None:
            raise Conflict(f"the key '{record.name}' was revoked: make another")
        return record

    async def _commit(
        self, record: KeyRecord, expected: str, writes: Sequence[Write] = (), compares: Sequence[Compare] = ()
    ) -> None:
        with expecting(expected, KEYS + record.key_id, self._manager.desired.revisions) as unchanged:
            await self._manager.commit([*writes, _write(record)], [*compares, *unchanged])

    def _secret_writes(self) -> tuple[list[Write], list[Compare], bytes]:
        if self._secret:
            return [], [], self._secret
        secret = secrets.token_bytes(SECRET_BYTES)
        record = ClusterSecret(secret=b64encode(secret).decode())
        return [Write(SECRET, encode(record))], [Compare(SECRET, 0)], secret

    def _made(self, record: KeyRecord, secret: bytes) -> MadeKey:
        text = key_text(secrets.token_bytes(KEY_BYTES))
        digest = digest_of(text, _derived(secret, b"digests"))
        return MadeKey(
            record.model_copy(update={"digest": digest, "created_at": record.created_at or self._clock()}), text
        )


def _write(record: KeyRecord) -> Write:
    return Write(KEYS + record.key_id, encode(record))


def _derived(secret: bytes, purpose: bytes) -> bytes:
    """Gateways are told one of these, and must not know the other."""
    return blake2b(purpose, key=blake2b(secret).digest(), digest_size=32).digest()
