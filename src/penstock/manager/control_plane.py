"""State that a manager shares with its services and features: desired state, election, term, events, membership."""

import asyncio
import time

import structlog

from penstock.core.cluster.manager_records import ManagerRecord
from penstock.manager.desired_store import DesiredStore, PlanAudit, plan_no_audit
from penstock.manager.event_log import Events, OnEvent, ignore_event
from penstock.manager.leading.election import SOLE_LEASE_S, Election
from penstock.manager.membership import Membership
from penstock.manager.term import Term
from penstock.manager.waiters import Waiters
from penstock.manager.worker_liveness import LivenessRules
from penstock.storage.metadata.metadata_store import MetadataStore

log = structlog.get_logger()
now = time.monotonic


class ControlPlane:
    """Holds the state that the parts of a manager share. Used from one event loop."""

    def __init__(
        self,
        store: MetadataStore,
        own_record: ManagerRecord | None = None,
        lease_s: float = SOLE_LEASE_S,
        rules: LivenessRules | None = None,
        plan_audit: PlanAudit = plan_no_audit,
        on_event: OnEvent = ignore_event,
    ) -> None:
        """`plan_audit` returns the audit records to write with a change; `on_event` is called for each event."""
        self._rules = rules or LivenessRules()
        self._confirming = asyncio.Lock()
        self._waiters = Waiters()
        self.wait_until, self.wait_for = self._waiters.wait_until, self._waiters.wait_for
        self.election = Election(store, own_record or ManagerRecord(manager_id="manager", address=""), lease_s)
        self.store = DesiredStore(store, self.election, self._waiters, plan_audit)
        self.desired, self.commit = self.store.state, self.store.commit
        self.events = Events(self.desired, self.commit, self.store.add, on_event)
        self.membership = Membership(self.desired, self.commit)
        self.term = self.create_term(0)

    def create_term(self, epoch: int, is_fresh: bool = False) -> Term:
        """Create the state of a new period of leadership; `epoch` 0 means that this manager does not lead."""
        return Term(epoch, self.desired, self._rules, now(), is_fresh)

    def set_term(self, term: Term) -> None:
        self.term = term
        self._waiters.wake()

    @property
    def epoch(self) -> int:
        """The number of the current period of leadership, or 0 if this manager does not lead at this moment."""
        return self.term.epoch if self.term.epoch == self.election.epoch else 0

    def check_leads(self) -> None:
        if not self.epoch:
            raise self.election.make_not_leading_error()

    async def check_peer_epoch(self, history: str, epoch: int) -> None:
        """Write a new history id, which invalidates all epochs, if a peer knows a later epoch than this leader.

        The peer's epoch is later if another manager has become leader, or if the store was restored from an older copy.
        In the second case this manager can still write to the store.
        """
        async with self._confirming:
            if self.epoch and history == self.desired.history and epoch > self.epoch:
                log.warning("older_store_detected", peer_epoch=epoch, epoch=self.epoch)
                await self.store.start_history()

    async def notify(self, is_changed: bool = False) -> None:
        """Queue the term's events for the event log; wake waiting tasks if the term changed or `is_changed` is set."""
        for draft in self.term.event_drafts:
            self.events.emit(*draft)
        self.term.event_drafts.clear()
        if self.term.take_changed() or is_changed:
            self._waiters.wake()
