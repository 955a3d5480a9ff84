"""The keys that session tokens are signed with, in the metadata store: made, rotated and let go of by who leads."""

import asyncio
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import structlog
from pydantic import ValidationError

from penstock.access.tokens import LIFE_S, SigningKey, public_part
from penstock.core.blocks import StoredValue
from penstock.core.errors import PenstockError, Refused, Unavailable
from penstock.manager.desired import Folded, encode
from penstock.manager.manager import Manager
from penstock.manager.tasks import Tasks
from penstock.storage.metadata.base import Write

log = structlog.get_logger()
SIGNING = "secrets/signing/"
TELL_S = 2.0  # what those who verify get to hear of a key, before anything is signed with it
SKEW_S = 60.0  # by which clocks may differ
TURN_S = 0.5
RETRY_S = 2.0
MAX_SIGNERS = 2000  # at one a second, twice what lives as long as a token


class SignerRecord(StoredValue):
    """`secrets/signing/<kid>`; times are seconds since 1970."""

    kid: str
    private: str  # base64
    public: str
    signs_from: float


def signers_of(stored: Mapping[str, bytes]) -> list[SignerRecord]:
    """Oldest first."""
    found = []
    for key, value in stored.items():
        if key.startswith(SIGNING):
            try:
                found.append(SignerRecord.model_validate_json(value))
            except ValidationError:
                log.warning("signing_key_passed_over", key=key)
    return sorted(found, key=lambda record: record.signs_from)


def public_parts(records: Sequence[SignerRecord]) -> dict[str, bytes]:
    """What doors are told."""
    return {record.kid: b64decode(record.public) for record in records}


def outlived(records: Sequence[SignerRecord], now: float) -> list[SignerRecord]:
    """Those of which no token can be good any more: another has signed for longer than one lives."""
    return [record for record, later in pairwise(records) if now >= later.signs_from + LIFE_S + SKEW_S]


def signing_now(records: Sequence[SignerRecord], now: float) -> SignerRecord | None:
    """The newest that others have heard of; of the only one nobody has to have heard."""
    return next((record for record in reversed(records) if record.signs_from <= now), records[0] if records else None)


class Signing:
    """Used from the manager's event loop."""

    def __init__(self, manager: Manager, rotate_s: float, clock: Callable[[], float] = time.time) -> None:
        self._manager = manager
        self._rotate_s = rotate_s
        self._clock = clock
        self._records = signers_of(manager.desired.others)
        self._tasks = Tasks("signing")
        self.close = self._tasks.close
        manager.on_folded.append(self._folded)

    def start(self) -> None:
        self._tasks.spawn(self._turn_forever())

    def key(self) -> SigningKey:
        found = signing_now(self._records, self._clock())
        if found is None:
            raise Unavailable("there is no key yet to sign session tokens with; try again")
        return SigningKey(found.kid, b64decode(found.private))

    async def rotate(self) -> SignerRecord:
        self._manager.check_leads()
        if len(self._records) >= MAX_SIGNERS:
            raise Refused(f"{MAX_SIGNERS} signing keys live still, of which tokens may be about: try again later")
        private, at = secrets.token_bytes(32), self._clock()
        made = SignerRecord(
            kid=f"sig-{secrets.token_hex(6)}",
            private=b64encode(private).decode(),
            public=b64encode(public_part(private)).decode(),
            signs_from=at + TELL_S if self._records else at,
        )
        await self._manager.commit([Write(SIGNING + made.kid, encode(made))])
        log.info("signing_key_made", kid=made.kid)
        return made

    async def _turn_forever(self) -> None:
        said = ""  # why it was not done last: told once
        while True:
            pause_s = TURN_S
            if self._manager.epoch:
                try:
                    await self._turn()
                    said = ""
                except PenstockError as error:
                    if error.message != said:
                        log.warning("signing_keys_not_written", error=error.message)
                    said, pause_s = error.message, RETRY_S
            await asyncio.sleep(pause_s)

    async def _turn(self) -> None:
        now = self._clock()
        if not self._records or now >= self._records[-1].signs_from + self._rotate_s:
            await self.rotate()
        if gone := outlived(self._records, now):
            await self._manager.commit([Write(SIGNING + record.kid, None) for record in gone[:64]])

    def _folded(self, folded: Folded) -> None:
        if any(key.startswith(SIGNING) for key in folded.others):
            self._records = signers_of(self._manager.desired.others)
