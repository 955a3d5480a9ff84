"""The keys that sign session tokens. The leader creates, rotates and deletes them in the metadata store."""

import asyncio
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import structlog
from pydantic import ValidationError

from penstock.core.blocks import StoredValue
from penstock.core.errors import PenstockError, Refused, Unavailable
from penstock.endpoints.session_tokens import LIFETIME_S, SigningKey, derive_public_key
from penstock.manager.control_plane import ControlPlane
from penstock.manager.desired_state import StateChanges, encode
from penstock.manager.feature import ManagerFeature
from penstock.storage.metadata.metadata_store import Write
from penstock.telemetry.background import BackgroundTasks

log = structlog.get_logger()
SIGNING = "secrets/signing/"
ROTATE_S = 86_400.0  # a day, far above the lifetime of a token; `penstock key rotate-signing` rotates at once
PUBLISH_S = 2.0  # between the creation of a key and its first use, so that every verifier has received it
SKEW_S = 60.0  # allowed difference between clocks
TICK_S = 0.5
RETRY_S = 2.0
MAX_SIGNERS = 2000  # twice the number of rotations within a token's lifetime, at one rotation per second


class SignerRecord(StoredValue):
    """A signing key in the metadata store, at `secrets/signing/<kid>`. Times are seconds since 1970."""

    kid: str
    private: str  # base64
    public: str
    signs_from: float


def read_signers(stored: Mapping[str, bytes]) -> list[SignerRecord]:
    """Return the stored signing keys, oldest first."""
    found = []
    for key, value in stored.items():
        if key.startswith(SIGNING):
            try:
                found.append(SignerRecord.model_validate_json(value))
            except ValidationError:
                log.warning("signing_key_record_skipped", key=key)
    return sorted(found, key=lambda record: record.signs_from)


def list_public_keys(records: Sequence[SignerRecord]) -> dict[str, bytes]:
    """Return the public keys by id. Endpoints verify tokens with them."""
    return {record.kid: b64decode(record.public) for record in records}


def find_expired_signers(records: Sequence[SignerRecord], now: float) -> list[SignerRecord]:
    """Return the keys whose tokens have all expired, because a later key has signed for the lifetime of a token."""
    return [record for record, later in pairwise(records) if now >= later.signs_from + LIFETIME_S + SKEW_S]


def find_current_signer(records: Sequence[SignerRecord], now: float) -> SignerRecord | None:
    """Return the newest key that every verifier has received, or otherwise the first key."""
    return next((record for record in reversed(records) if record.signs_from <= now), records[0] if records else None)


class Signing(ManagerFeature):
    """Keeps the signing keys up to date. Used from the manager's event loop."""

    def __init__(
        self, control: ControlPlane, rotate_s: float = ROTATE_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._control = control
        self._rotate_s = rotate_s
        self._clock = clock
        self._records = read_signers(control.desired.others)
        self._tasks = BackgroundTasks("signing")
        self._problem = ""  # why the last write failed; empty if it succeeded

    def start(self) -> None:
        self._tasks.supervise("signing-keys", self._tick_if_leading, every=TICK_S)

    async def close(self) -> None:
        await self._tasks.close()

    def get_key(self) -> SigningKey:
        found = find_current_signer(self._records, self._clock())
        if found is None:
            raise Unavailable("no key for signing session tokens exists yet; try again")
        return SigningKey(found.kid, b64decode(found.private))

    async def rotate(self) -> SignerRecord:
        self._control.check_leads()
        if len(self._records) >= MAX_SIGNERS:
            raise Refused(f"{MAX_SIGNERS} signing keys still have unexpired tokens; try again later")
        private, at = secrets.token_bytes(32), self._clock()
        made = SignerRecord(
            kid=f"sig-{secrets.token_hex(6)}",
            private=b64encode(private).decode(),
            public=b64encode(derive_public_key(private)).decode(),
            signs_from=at + PUBLISH_S if self._records else at,
        )
        await self._control.commit([Write(SIGNING + made.kid, encode(made))])
        log.debug("signing_key_created", kid=made.kid)
        return made

    async def _tick_if_leading(self) -> None:
        if not self._control.epoch:
            return
        try:
            await self._tick()
            self._problem = ""
        except PenstockError as error:
            if error.message != self._problem:
                log.warning("writing_signing_keys_failed", error=error.message)
            self._problem = error.message
            await asyncio.sleep(RETRY_S)

    async def _tick(self) -> None:
        now = self._clock()
        if not self._records or now >= self._records[-1].signs_from + self._rotate_s:
            await self.rotate()
        if expired := find_expired_signers(self._records, now):
            await self._control.commit([Write(SIGNING + record.kid, None) for record in expired[:64]])

    def state_changed(self, state_changes: StateChanges) -> None:
        if any(key.startswith(SIGNING) for key in state_changes.others):
            self._records = read_signers(self._control.desired.others)
