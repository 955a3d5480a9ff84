"""API keys: their text, the record that is kept of one, and the table by which a process knows them. Decides only.

A key's text is shown once and kept nowhere: what is kept is its digest under the cluster's secret, so a table that gets
lost opens no door. Looking a key up is one digest and one look into a map, whatever the key.
"""

from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from functools import lru_cache
from hashlib import blake2b
from math import inf, isfinite
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from penstock.core.blocks import StoredValue
from penstock.core.cluster.access_view import AccessView
from penstock.core.principals import KEY_PREFIX, KeyLimits, Principal, Scope

KEY_BYTES = 32  # of chance, in the text of a key
SECRET_BYTES = 32  # of chance, in a cluster's secret
MAX_SECRET_BYTES = 64  # that the digest takes
DIGEST_BYTES = 32
NONE: Mapping[str, Principal] = {}


class KeyRecord(StoredValue):
    """`keys/<key_id>` in the metadata store; times are seconds since 1970."""

    key_id: Annotated[str, Field(min_length=1, max_length=64)]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    digest: str  # hexadecimal
    scopes: frozenset[Scope] = frozenset()
    models: tuple[str, ...] = ()  # patterns; empty: all
    blocks: tuple[str, ...] = ()
    expires_at: float | None = None
    limits: KeyLimits | None = None
    created_at: float = 0.0
    created_by: str = ""
    revoked_at: float | None = None
    rotated_at: float = 0.0
    rotated_digest: str = ""  # of the text that it had before it was rotated
    rotated_until: float = 0.0  # how long that is good still

    def principal(self, until: float = inf) -> Principal:
        expires_at = min(until, inf if self.expires_at is None else self.expires_at)
        return Principal(self.name, self.key_id, self.scopes, self.models, self.blocks, self.limits, expires_at)

    def holders(self) -> list[tuple[bytes, Principal]]:
        """Who has it, by the digests of its texts."""
        if self.revoked_at is not None:
            return []
        found = [(bytes.fromhex(self.digest), self.principal())]
        if self.rotated_digest:
            found.append((bytes.fromhex(self.rotated_digest), self.principal(self.rotated_until)))
        return found


@lru_cache(16_384)
def _holders(record: bytes) -> list[tuple[bytes, Principal]]:
    """Few of all keys change at a time, and nobody waits while the others are read again. What a later version of
    Penstock wrote and this one cannot read is nobody's."""
    try:
        return KeyRecord.model_validate_json(record).holders()
    except ValidationError:
        return []


class KeyChanges(BaseModel):
    """What of a key is to be another: what is given; null takes a list, an expiry or limits away."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scopes: Annotated[frozenset[Scope], Field(min_length=1)] = frozenset()
    models: tuple[str, ...] | None = None
    blocks: tuple[str, ...] | None = None
    expires_at: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    limits: KeyLimits | None = None

    @field_validator("limits")
    @classmethod
    def _are_limits(cls, limits: KeyLimits | None) -> KeyLimits | None:
        if limits is not None and not all(isfinite(value) and value >= 0 for value in astuple(limits)):
            raise ValueError("a limit is a number from 0 on")
        return limits

    def given(self) -> dict[str, object]:
        found = {name: getattr(self, name) for name in self.model_fields_set}
        lists: dict[str, object] = {name: found[name] or () for name in ("models", "blocks") if name in found}
        return found | lists


class KeyTable:
    """Never changes: whoever hears of a change makes a new one."""

    def __init__(
        self,
        secret: bytes,
        records: Iterable[KeyRecord] = (),
        is_asking: bool = True,
        further: Mapping[str, Principal] = NONE,
    ) -> None:
        """`is_asking`: a key was once made in this cluster, whatever became of it. `further`: texts without records."""
        self.is_asking = is_asking
        self.revoked: set[str] = set()  # ids
        self._hash = blake2b(key=secret_of(secret), digest_size=DIGEST_BYTES)
        self._by_digest: dict[bytes, Principal] = {self._digest(text): known for text, known in further.items()}
        for record in records:
            if record.revoked_at is not None:
                self.revoked.add(record.key_id)
            self._by_digest.update(record.holders())

    @classmethod
    def of(cls, view: AccessView) -> "KeyTable":
        """What a manager told."""
        table = cls(view.secret, is_asking=view.is_asking)
        for record in view.keys.values():
            table._by_digest.update(_holders(record))
        return table

    def find(self, text: str) -> Principal | None:
        """Who has this key, expired or not."""
        return self._by_digest.get(self._digest(text))

    def _digest(self, text: str) -> bytes:
        digest = self._hash.copy()
        digest.update(text.encode("latin-1", "replace"))
        return digest.digest()


def key_text(chance: bytes) -> str:
    """What its holder shows: made once of KEY_BYTES that nobody can guess."""
    assert len(chance) == KEY_BYTES
    return KEY_PREFIX + urlsafe_b64encode(chance).decode().rstrip("=")


def digest_of(text: str, secret: bytes) -> str:
    """What a record keeps of a key's text."""
    return blake2b(text.encode("latin-1", "replace"), key=secret_of(secret), digest_size=DIGEST_BYTES).hexdigest()


def secret_of(given: bytes) -> bytes:
    """The cluster's secret as the digest takes it, however long it was given."""
    return given if len(given) <= MAX_SECRET_BYTES else blake2b(given).digest()
