"""The desired state in the metadata store: every manager follows it, the one that leads writes it."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import structlog

from penstock.core.errors import Conflict, StoreUnavailable
from penstock.manager.desired import HISTORY, DesiredState, Folded
from penstock.manager.leading.election import Election
from penstock.manager.waiters import Waiters
from penstock.storage.metadata.base import MAX_WRITES, Compare, MetadataStore, Snapshot, Write
from penstock.storage.metadata.following import follow

log = structlog.get_logger()
APPLY_S = 10.0  # what the store gets to tell of what it took
PlanAudit = Callable[[Sequence[Write]], Awaitable[Sequence[Write]]]


class DesiredStore:
    def __init__(self, store: MetadataStore, election: Election, waiters: Waiters) -> None:
        self._store = store
        self._election = election
        self._waiters = waiters
        self._has_heard = False
        self.state = DesiredState()
        self.audit: PlanAudit = _unaudited  # what is written beside a change, of who asked for it

    async def wait_heard(self) -> None:
        """It has what was there at first, or the store is away."""
        await self._waiters.becomes(lambda: self._has_heard, APPLY_S)

    async def follow(self) -> AsyncIterator[Folded]:
        async for heard in follow(self._store, ""):
            folded = self.state.restart(heard) if isinstance(heard, Snapshot) else self.state.fold(heard)
            for key, reason in folded.unread:
                log.warning("record_passed_over", key=key, reason=reason)
            self._has_heard = True
            yield folded

    async def commit(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> int:
        """Writes as long as this manager leads, and returns when it has folded it itself."""
        if not writes:
            return self.state.revision
        revision = 0
        writes = [*writes, *await self.audit(writes)]
        for first in range(0, len(writes), MAX_WRITES):
            try:
                part = writes[first : first + MAX_WRITES]
                revision = await self._store.commit(part, [self._election.guard, *compares])
            except Conflict as error:
                if compares and self._election.epoch:
                    raise
                raise self._election.not_leading() from error  # another does
        await self._wait_folded(revision)
        return revision

    async def add(self, writes: Sequence[Write]) -> None:
        """Whoever leads; raises Conflict where one of them is there already."""
        unused = [Compare(write.key, 0) for write in writes if write.value is not None]
        await self._wait_folded(await self._store.commit(writes, unused))

    async def _wait_folded(self, revision: int) -> None:
        if not await self._waiters.becomes(lambda: self.state.revision >= revision, APPLY_S):
            raise StoreUnavailable(
                "it was written, but the metadata store does not tell of it; ask again how it stands"
            )

    async def begin_history(self) -> None:
        """What revisions and epochs are counted in from here on."""
        await self.commit([Write(HISTORY, secrets.token_hex(8).encode(), may_wait=True)])


async def _unaudited(writes: Sequence[Write]) -> Sequence[Write]:
    return ()
