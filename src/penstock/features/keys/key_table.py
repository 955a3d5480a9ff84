"""API keys: their texts, their stored records, and the table in which a process looks keys up. Pure: no I/O.

A key's text is shown once and never stored. The record contains a digest of the text, keyed with the cluster's secret,
so a leaked table gives no access. A lookup is one digest and one dictionary access for any key.
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
from penstock.features.keys.certificate_principals import CERTIFICATE

KEY_BYTES = 32  # random bytes in the text of a key
SECRET_BYTES = 32  # random bytes in a cluster's secret
MAX_SECRET_BYTES = 64  # the longest key of BLAKE2b
DIGEST_BYTES = 32
NONE: Mapping[str, Principal] = {}


class KeyRecord(StoredValue):
    """A key in the metadata store, at `keys/<key_id>`. Times are seconds since 1970."""

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
    rotated_digest: str = ""  # of the text before the last rotation
    rotated_until: float = 0.0  # until this time, the text before the last rotation is valid

    def make_principal(self, until: float = inf) -> Principal:
        expires_at = min(until, inf if self.expires_at is None else self.expires_at)
        return Principal(self.name, self.key_id, self.scopes, self.models, self.blocks, self.limits, expires_at)

    def list_holders(self) -> list[tuple[bytes, Principal]]:
        """Return the key's principals, by the digests of its valid texts."""
        if self.revoked_at is not None:
            return []
        found = [(bytes.fromhex(self.digest), self.make_principal())]
        if self.rotated_digest:
            found.append((bytes.fromhex(self.rotated_digest), self.make_principal(self.rotated_until)))
        return found


@lru_cache(16_384)
def _decode_holders(record: bytes) -> list[tuple[bytes, Principal]]:
    """Return the principals of an encoded record; an empty list if a later version of Penstock wrote it.

    The results are cached, because only a few keys change at a time.
    """
    try:
        return KeyRecord.model_validate_json(record).list_holders()
    except ValidationError:
        return []


class KeyChanges(BaseModel):
    """The fields of a key to change. A field set to null removes the list, the expiry or the limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scopes: Annotated[frozenset[Scope], Field(min_length=1)] = frozenset()
    models: tuple[str, ...] | None = None
    blocks: tuple[str, ...] | None = None
    expires_at: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    limits: KeyLimits | None = None

    @field_validator("limits")
    @classmethod
    def _check_limits(cls, limits: KeyLimits | None) -> KeyLimits | None:
        if limits is not None and not all(isfinite(value) and value >= 0 for value in astuple(limits)):
            raise ValueError("a limit must be a finite number of at least 0")
        return limits

    def updates(self) -> dict[str, object]:
        found = {name: getattr(self, name) for name in self.model_fields_set}
        lists: dict[str, object] = {name: found[name] or () for name in ("models", "blocks") if name in found}
        return found | lists


class KeyTable:
    """A table of principals by API key. Immutable: a change of the keys makes a new table."""

    def __init__(
        self,
        secret: bytes,
        records: Iterable[KeyRecord] = (),
        needs_key: bool = True,
        further: Mapping[str, Principal] = NONE,
    ) -> None:
        """Create a table. `needs_key`: keys are required, because a key was created in this cluster at some time.

        `further`: principals by key text, for keys without records.
        """
        self.needs_key = needs_key
        self._hash = blake2b(key=shorten_secret(secret), digest_size=DIGEST_BYTES)
        self._by_digest: dict[bytes, Principal] = {self._compute_digest(text): known for text, known in further.items()}
        self._valid_until: dict[str, float] = {}  # by id, of keys that are not revoked
        for record in records:
            self._add_holders(record.list_holders())

    @classmethod
    def from_view(cls, view: AccessView) -> "KeyTable":
        """Return the table of the keys that a manager published."""
        table = cls(view.secret, needs_key=view.needs_key)
        for record in view.keys.values():
            table._add_holders(_decode_holders(record))
        return table

    def find(self, text: str) -> Principal | None:
        """Return the principal of the key, even if the key has expired."""
        return self._by_digest.get(self._compute_digest(text))

    def find_expiry(self, key_id: str) -> float:
        """Return when the key expires, in seconds since 1970; -inf if the key was revoked or deleted.

        Callers without an API key (an empty id, or a certificate's id) always stay valid.
        """
        is_key = key_id and not key_id.startswith(CERTIFICATE)
        return self._valid_until.get(key_id, -inf) if is_key else inf

    def _add_holders(self, holders: Iterable[tuple[bytes, Principal]]) -> None:
        for digest, principal in holders:
            self._by_digest[digest] = principal
            until = self._valid_until.get(principal.key_id, -inf)
            self._valid_until[principal.key_id] = max(until, principal.expires_at)

    def _compute_digest(self, text: str) -> bytes:
        digest = self._hash.copy()
        digest.update(text.encode("latin-1", "replace"))
        return digest.digest()


def format_key_text(random_bytes: bytes) -> str:
    """Return the text of a new key, made of KEY_BYTES random bytes."""
    assert len(random_bytes) == KEY_BYTES
    return KEY_PREFIX + urlsafe_b64encode(random_bytes).decode().rstrip("=")


def compute_key_digest(text: str, secret: bytes) -> str:
    """Return the HMAC of an API key's text, in the form that key records store."""
    return blake2b(text.encode("latin-1", "replace"), key=shorten_secret(secret), digest_size=DIGEST_BYTES).hexdigest()


def shorten_secret(secret: bytes) -> bytes:
    """Return the cluster's secret, hashed if it is longer than MAX_SECRET_BYTES."""
    return secret if len(secret) <= MAX_SECRET_BYTES else blake2b(secret).digest()
