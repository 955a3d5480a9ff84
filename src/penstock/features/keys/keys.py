"""The API keys of a cluster in its metadata store, and their publication to gateways and workers."""

import asyncio
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import inf, isfinite
from typing import NamedTuple

import structlog
from pydantic import ValidationError

from penstock.core.blocks import StoredValue
from penstock.core.cluster.access_view import AccessView
from penstock.core.error_text import describe_first_problem
from penstock.core.errors import Conflict, InvalidRequest, NameTaken, NotFound
from penstock.core.principals import ANY_SCOPE, Principal
from penstock.endpoints.guard import Guard
from penstock.features.keys.key_table import (
    KEY_BYTES,
    SECRET_BYTES,
    KeyChanges,
    KeyRecord,
    KeyTable,
    compute_key_digest,
    format_key_text,
)
from penstock.features.keys.signing import SIGNING, list_public_keys, read_signers
from penstock.manager.control_plane import ControlPlane
from penstock.manager.desired_state import StateChanges, encode
from penstock.manager.feature import ManagerFeature
from penstock.manager.publishing.etags import require_etag
from penstock.manager.term import Term
from penstock.storage.metadata.metadata_store import Compare, Write

log = structlog.get_logger()
KEYS, SECRET = "keys/", "secrets/cluster"
MAX_KEYS = 10_000
MANAGER = Principal("manager", scopes=ANY_SCOPE)  # another manager of the cluster


class ClusterSecret(StoredValue):
    """The secret of key digests, created with the first key if no setting contains one."""

    secret: str  # base64


class CreatedKey(NamedTuple):
    record: KeyRecord
    text: str


class Keys(ManagerFeature):
    """Creates, changes and publishes the keys, from the manager's event loop. Each key has a record in the store."""

    def __init__(
        self, control: ControlPlane, guard: Guard, secret: bytes = b"", clock: Callable[[], float] = time.time
    ) -> None:
        """Read the keys. `secret` is the cluster's secret from the settings; if empty, the store has the secret."""
        self._control = control
        self._guard = guard
        self._given = secret
        self._clock = clock
        self._records: dict[str, KeyRecord] = {}
        self._deleted: set[str] = set()  # ids of keys that were deleted while this manager ran
        self._secret = secret
        # Held until a change has come back from the store: changing an outdated record could undo a revocation.
        self._changing = asyncio.Lock()
        self._read_keys()

    # --- requests of operators

    async def create(self, requested: KeyRecord) -> CreatedKey:
        """Create a key from a record that has no id and no digest."""
        async with self._changing:
            self._control.check_leads()
            if any(each.name == requested.name for each in self._records.values()):
                raise NameTaken(
                    f"a key named '{requested.name}' exists or was revoked; choose another name, or rotate the key"
                )
            if len(self._records) >= MAX_KEYS:
                raise InvalidRequest(f"the cluster already has {MAX_KEYS} keys, including revoked ones")
            writes, compares, secret = self._plan_secret()
            made = self._make_text(requested.model_copy(update={"key_id": f"key-{secrets.token_hex(6)}"}), secret)
            write, absent = _record_write(made.record), Compare(KEYS + made.record.key_id, 0)
            await self._control.commit([*writes, write], [*compares, absent])
            scopes = ", ".join(sorted(made.record.scopes))
            self._control.events.emit("key_created", made.record.name, f"key created with scopes {scopes}")
            return made

    async def revoke(self, name: str, expected: str = "") -> KeyRecord:
        """Revoke a key. `expected`, here and in other methods: the ETag that the key must have; empty: any."""
        async with self._changing:
            record = self.find(name)
            self._control.check_leads()
            if record.revoked_at is None:
                record = record.model_copy(
                    update={"revoked_at": self._clock(), "rotated_digest": "", "rotated_until": 0.0}
                )
                await self._commit(record, expected)
                self._control.events.emit("key_revoked", record.name, "key revoked")
            return record

    async def change(self, name: str, changes: KeyChanges, expected: str = "") -> KeyRecord:
        """Change the given fields of a key; the key's text and name stay."""
        async with self._changing:
            record = self._find_unrevoked(name).model_copy(update=changes.updates())
            await self._commit(record, expected)
            scopes = ", ".join(sorted(record.scopes))
            self._control.events.emit("key_changed", record.name, f"key changed; its scopes are {scopes}")
            return record

    async def rotate(self, name: str, grace_s: float, expected: str = "") -> CreatedKey:
        """Give the key a new text; the old text stays valid for `grace_s`."""
        async with self._changing:
            record = self._find_unrevoked(name)
            writes, unmade, secret = self._plan_secret()
            until = self._clock() + grace_s
            old = {"rotated_digest": record.digest, "rotated_until": until} if grace_s else {"rotated_digest": ""}
            made = self._make_text(record.model_copy(update={**old, "rotated_at": self._clock()}), secret)
            await self._commit(made.record, expected, writes, unmade)
            text = f"key rotated; the old text stays valid for {grace_s:g} s"
            self._control.events.emit("key_rotated", record.name, text)
            return made

    def get_revision(self, record: KeyRecord) -> int:
        return self._control.desired.revisions.get(KEYS + record.key_id, 0)

    def list_keys(self) -> list[KeyRecord]:
        return sorted(self._records.values(), key=lambda record: record.name)

    def find(self, name: str) -> KeyRecord:
        """Return the key with this id or name."""
        for record in self._records.values():
            if name in (record.key_id, record.name):
                return record
        raise NotFound(f"there is no key '{name[:128]}'; 'penstock key list' shows all keys")

    def find_expiry(self, key_id: str) -> float:
        return self._table.find_expiry(key_id)

    @property
    def managers_key(self) -> str:
        """Return the key with which the cluster's managers call each other; empty if there is no secret."""
        return _derive_secret(self._secret, b"managers").hex() if self._secret else ""

    # --- calls of the manager

    def term_started(self, term: Term) -> None:
        self._publish(term)

    def state_changed(self, state_changes: StateChanges) -> None:
        if SECRET in state_changes.others or any(key.startswith((KEYS, SIGNING)) for key in state_changes.others):
            self._read_keys()
            self._publish(self._control.term)

    def _read_keys(self) -> None:
        others, found = self._control.desired.others, {}
        for key, value in others.items():
            if key.startswith(KEYS):
                try:
                    record = KeyRecord.model_validate_json(value)
                    found[record.key_id] = record
                except ValidationError as error:
                    log.warning("key_record_skipped", key=key, error=describe_first_problem(error))
        self._deleted = (self._deleted | self._records.keys()) - found.keys()
        self._records = found
        if SECRET in others and not self._given:
            self._secret = b64decode(ClusterSecret.model_validate_json(others[SECRET]).secret)
        own = {self.managers_key: MANAGER} if self._secret else {}
        secret = _derive_secret(self._secret, b"digests")
        self._table = KeyTable(secret, self._records.values(), bool(self._records), own)
        self._guard.set_keys(self._table)

    def _publish(self, term: Term) -> None:
        secret = _derive_secret(self._secret, b"digests")
        known = {key_id: encode(record) for key_id, record in self._records.items()}
        signers = list_public_keys(read_signers(self._control.desired.others))
        valid = {key_id: self.find_expiry(key_id) for key_id in self._records}
        revoked = frozenset(key_id for key_id, until in valid.items() if until == -inf) | self._deleted
        expires_at = {key_id: until for key_id, until in valid.items() if isfinite(until)}
        term.set_access(AccessView(secret, bool(known), known, signers, revoked=revoked, expires_at=expires_at))

    # --- helpers

    def _find_unrevoked(self, name: str) -> KeyRecord:
        record = self.find(name)
        self._control.check_leads()
        if record.revoked_at is not None:
            raise Conflict(f"the key '{record.name}' was revoked; create another key")
        return record

    async def _commit(
        self, record: KeyRecord, expected: str, writes: Sequence[Write] = (), compares: Sequence[Compare] = ()
    ) -> None:
        with require_etag(expected, KEYS + record.key_id, self._control.desired.revisions) as unchanged:
            await self._control.commit([*writes, _record_write(record)], [*compares, *unchanged])

    def _plan_secret(self) -> tuple[list[Write], list[Compare], bytes]:
        if self._secret:
            return [], [], self._secret
        secret = secrets.token_bytes(SECRET_BYTES)
        record = ClusterSecret(secret=b64encode(secret).decode())
        return [Write(SECRET, encode(record))], [Compare(SECRET, 0)], secret

    def _make_text(self, record: KeyRecord, secret: bytes) -> CreatedKey:
        text = format_key_text(secrets.token_bytes(KEY_BYTES))
        digest = compute_key_digest(text, _derive_secret(secret, b"digests"))
        return CreatedKey(
            record.model_copy(update={"digest": digest, "created_at": record.created_at or self._clock()}), text
        )


def _record_write(record: KeyRecord) -> Write:
    return Write(KEYS + record.key_id, encode(record))


def _derive_secret(secret: bytes, purpose: bytes) -> bytes:
    """Derive a secret for one purpose. Gateways know the secret for digests, and must not know the managers' secret."""
    return blake2b(purpose, key=blake2b(secret).digest(), digest_size=32).digest()
