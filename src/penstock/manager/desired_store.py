"""The desired state in the metadata store: every manager reads the state, and only the leader writes it."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import structlog

from penstock.core.errors import Conflict, StoreUnavailable
from penstock.manager.desired_state import HISTORY, DesiredState, StateChanges
from penstock.manager.leading.election import Election
from penstock.manager.waiters import Waiters
from penstock.storage.metadata.following import follow
from penstock.storage.metadata.metadata_store import MAX_WRITES, Compare, MetadataStore, Snapshot, Write

log = structlog.get_logger()
APPLY_S = 10.0  # how long the store may take to send back a change that it committed
PlanAudit = Callable[[Sequence[Write]], Awaitable[Sequence[Write]]]


async def plan_no_audit(writes: Sequence[Write]) -> Sequence[Write]:
    return ()


class DesiredStore:
    def __init__(
        self, store: MetadataStore, election: Election, waiters: Waiters, plan_audit: PlanAudit = plan_no_audit
    ) -> None:
        """`plan_audit` returns the audit records to write with a change."""
        self._store = store
        self._election = election
        self._waiters = waiters
        self._is_synced = False
        self.state = DesiredState()
        self._plan_audit = plan_audit

    async def wait_synced(self) -> None:
        """Wait until the first snapshot is read, or until `APPLY_S` have passed because the store is unavailable."""
        await self._waiters.wait_for(lambda: self._is_synced, APPLY_S)

    async def follow(self) -> AsyncIterator[StateChanges]:
        async for update in follow(self._store, ""):
            state_changes = (
                self.state.replace_all(update) if isinstance(update, Snapshot) else self.state.apply_changes(update)
            )
            for key, reason in state_changes.unreadable:
                log.warning("record_skipped", key=key, reason=reason)
            self._is_synced = True
            yield state_changes

    async def commit(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> int:
        """Write changes if this manager leads; return their revision when this manager has applied the changes."""
        if not writes:
            return self.state.revision
        revision = 0
        writes = [*writes, *await self._plan_audit(writes)]
        for first in range(0, len(writes), MAX_WRITES):
            try:
                part = writes[first : first + MAX_WRITES]
                revision = await self._store.commit(part, [self._election.write_condition, *compares])
            except Conflict as error:
                if compares and self._election.epoch:
                    raise
                raise self._election.make_not_leading_error() from error  # another manager leads
        await self._wait_applied(revision)
        return revision

    async def add(self, writes: Sequence[Write]) -> None:
        """Write new records, even if this manager does not lead; raise Conflict if one of the records exists."""
        unused = [Compare(write.key, 0) for write in writes if write.value is not None]
        await self._wait_applied(await self._store.commit(writes, unused))

    async def _wait_applied(self, revision: int) -> None:
        if not await self._waiters.wait_for(lambda: self.state.revision >= revision, APPLY_S):
            raise StoreUnavailable(
                f"the change was written, but the metadata store did not report it within {APPLY_S:g} s; "
                "read the state again"
            )

    async def start_history(self) -> None:
        """Write a new random history id, which makes the revisions and epochs of earlier histories invalid."""
        await self.commit([Write(HISTORY, secrets.token_hex(8).encode(), may_wait=True)])
