"""Takes part in elections: performs in the metadata store the actions that leadership.py decides on."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog
from pydantic import ValidationError

from penstock.core.cluster.manager_records import LEADER_KEY, MANAGERS_PREFIX, LeaderRecord, ManagerRecord
from penstock.core.errors import Conflict, LeaseLost, NotLeader, PenstockError
from penstock.manager.leading.leadership import (
    BeginTerm,
    Campaign,
    CampaignEnded,
    EndTerm,
    GrantLease,
    KeepLease,
    LeaderSeen,
    Leadership,
    LeadershipAction,
    LeadershipEvent,
    LeaseCallFailed,
    LeaseEnded,
    LeaseGranted,
    LeaseKept,
    Register,
    Registered,
    Resigning,
    RevokeLease,
    StoreSetBack,
    TimePassed,
)
from penstock.storage.metadata.following import follow
from penstock.storage.metadata.metadata_store import Change, Compare, MetadataStore, Record, Snapshot, Write
from penstock.telemetry.background import BackgroundTasks

log = structlog.get_logger()
M = TypeVar("M", bound=ManagerRecord)
LEASE_S = 2.0  # silence of a leader after which another manager takes over; etcd itself elects a leader within 1 s
SOLE_LEASE_S = 86_400.0  # for a manager that does not share its store
RESIGN_S = 1.0
MAX_NAME_TAKEN = 30  # failed registrations, over some seconds, after which the log reports that the name is taken


class Election:
    def __init__(
        self,
        store: MetadataStore,
        manager: ManagerRecord,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._manager = manager
        self._ttl_s = ttl_s
        self._on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._leadership = Leadership(ttl_s)
        self._tasks = BackgroundTasks("election")
        self._timer: asyncio.TimerHandle | None = None
        self._revoked: asyncio.Task[None] | None = None
        self._name_taken_count = 0
        self.leader: LeaderRecord | None = None  # the last known leader
        self._leader_revision = 0
        self.managers: dict[str, ManagerRecord] = {}  # managers that hold a lease, by id

    def start(self, on_change: Callable[[], None]) -> None:
        """Take part in elections. `on_change` is called when a term starts or ends, and when another manager leads."""
        self._on_change = on_change
        self._tasks.supervise("election-leader", self._follow_leader, deadline_s=None)
        self._tasks.supervise("election-managers", self._follow_managers, deadline_s=None)
        self._handle(TimePassed())

    async def close(self) -> None:
        """Resign, so that another manager may lead at once."""
        self._handle(Resigning())
        if self._timer is not None:
            self._timer.cancel()
        if self._revoked is not None:
            await asyncio.wait({self._revoked}, timeout=RESIGN_S)
        await self._tasks.close()

    @property
    def manager_id(self) -> str:
        return self._manager.manager_id

    @property
    def epoch(self) -> int:
        """Return the epoch of this manager's term, or 0 if this manager does not lead at this moment."""
        return self._leadership.compute_epoch(self._clock())

    @property
    def leader_epoch(self) -> int:
        """Return the epoch of the known leader, or 0 if no leader is known."""
        return self._leader_revision if self.leader is not None else 0

    @property
    def write_condition(self) -> Compare:
        """Return the condition of every write: the write fails if this manager no longer leads."""
        if epoch := self.epoch:
            return Compare(LEADER_KEY, epoch)
        raise self.make_not_leading_error()

    def make_not_leading_error(self) -> NotLeader:
        leader = self.leader
        if leader is None or leader.address == self._manager.address:
            return NotLeader("no manager leads this cluster at the moment; try again", leader="")
        return NotLeader(
            f"manager '{leader.manager_id}' leads this cluster; send the request to {leader.address}",
            leader=leader.address,
        )

    # --- events and actions

    def _handle(self, event: LeadershipEvent) -> None:
        for action in self._leadership.handle(event, self._clock()):
            self._perform(action)
        if self._timer is not None:
            self._timer.cancel()
        wake_s = self._leadership.wake_at - self._clock()
        if wake_s != float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wake_s), self._handle, TimePassed())

    def _perform(self, action: LeadershipAction) -> None:
        match action:
            case GrantLease():
                self._tasks.spawn(self._grant_lease())
            case KeepLease(lease):
                self._tasks.spawn(self._renew_lease(lease))
            case Register(lease):
                self._tasks.spawn(self._register_manager(lease))
            case Campaign(lease, expected):
                self._tasks.spawn(self._try_to_lead(lease, expected))
            case RevokeLease(lease):
                self._revoked = self._tasks.spawn(self._revoke_lease(lease))
            case BeginTerm(epoch):
                log.debug("term_started", manager=self.manager_id, epoch=epoch, at_s=self._clock())
                self._on_change()
            case EndTerm(epoch, reason, is_resigning):
                report = log.debug if is_resigning else log.warning
                report("term_ended", manager=self.manager_id, epoch=epoch, reason=reason, at_s=self._clock())
                self._on_change()

    async def _grant_lease(self) -> None:
        sent_at = self._clock()
        try:
            lease = await self._store.grant(self._ttl_s)
        except PenstockError as error:
            log.warning("granting_lease_failed", error=error.message)
            self._handle(LeaseCallFailed(0))
        else:
            self._handle(LeaseGranted(lease, self._ttl_s, sent_at))

    async def _renew_lease(self, lease: int) -> None:
        sent_at = self._clock()
        try:
            left_s = await self._store.keep_alive(lease)
        except LeaseLost:
            self._handle(LeaseEnded(lease))
        except PenstockError as error:
            log.warning("keeping_lease_failed", error=error.message)
            self._handle(LeaseCallFailed(lease))
        else:
            self._handle(LeaseKept(lease, left_s, sent_at))

    async def _register_manager(self, lease: int) -> None:
        key, value = f"{MANAGERS_PREFIX}{self.manager_id}", self._manager.model_dump_json().encode()
        try:
            found = await self._store.get(key)
            other = _read_record(ManagerRecord, found.value) if found is not None else None
            if other is not None and other.address != self._manager.address:
                self._report_taken_name(other)
                self._handle(Registered(lease, is_done=False))
                return
            await self._store.put(key, value, lease=lease)
        except LeaseLost:
            self._handle(LeaseEnded(lease))
        except PenstockError as error:
            log.warning("registering_manager_failed", error=error.message)
            self._handle(Registered(lease, is_done=False))
        else:
            self._handle(Registered(lease, is_done=True))

    def _report_taken_name(self, other: ManagerRecord) -> None:
        """Log the conflict only if it lasts: the record of this manager's previous process expires soon."""
        self._name_taken_count += 1
        if self._name_taken_count == MAX_NAME_TAKEN:
            log.error("manager_name_taken", name=self.manager_id, by=other.address, advice="set --node on each host")

    async def _try_to_lead(self, lease: int, expected: int) -> None:
        leader = LeaderRecord(**self._manager.model_dump(), lease=lease)
        try:
            revision = await self._store.commit(
                [Write(LEADER_KEY, leader.model_dump_json().encode(), lease)], [Compare(LEADER_KEY, expected)]
            )
        except LeaseLost:
            self._handle(LeaseEnded(lease))
        except PenstockError as error:
            if not isinstance(error, Conflict):
                log.warning("campaign_failed", error=error.message)
            self._handle(CampaignEnded(lease))
        else:
            self._set_leader(leader, revision)
            self._handle(CampaignEnded(lease))

    async def _revoke_lease(self, lease: int) -> None:
        try:
            await self._store.revoke(lease)
        except PenstockError as error:
            log.warning("revoking_lease_failed", error=error.message)  # the lease expires by itself

    async def _follow_leader(self) -> None:
        async for update in follow(self._store, LEADER_KEY):
            if isinstance(update, Snapshot) and update.revision < self._leader_revision:
                log.warning("older_store_detected", revision=update.revision, before=self._leader_revision)
                self._leader_revision = 0
                self._handle(StoreSetBack())
            found = [each for each in _list_entries(update) if each.key == LEADER_KEY]
            if found:
                leader = _read_record(LeaderRecord, found[0].value)
                self._set_leader(leader, found[0].revision, exists=found[0].value is not None)
            elif isinstance(update, Snapshot):
                self._set_leader(None, update.revision, exists=False)

    def _set_leader(self, leader: LeaderRecord | None, revision: int, exists: bool = True) -> None:
        if revision > self._leader_revision:
            self.leader, self._leader_revision = leader, revision
            self._handle(LeaderSeen(revision, leader.lease if leader else 0, exists))
            self._on_change()

    async def _follow_managers(self) -> None:
        async for update in follow(self._store, MANAGERS_PREFIX):
            if isinstance(update, Snapshot):
                self.managers.clear()
            for each in _list_entries(update):
                manager_id = each.key.removeprefix(MANAGERS_PREFIX)
                self.managers.pop(manager_id, None)
                if found := _read_record(ManagerRecord, each.value):
                    self.managers[manager_id] = found


def _list_entries(update: Snapshot | Sequence[Change]) -> Sequence[Record | Change]:
    return update.records if isinstance(update, Snapshot) else update


def _read_record(record_type: type[M], value: bytes | None) -> M | None:
    """Return the record, or None if the value is missing or was written by an incompatible version of Penstock."""
    if value is None:
        return None
    try:
        return record_type.model_validate_json(value)
    except ValidationError as error:
        log.warning("manager_record_unreadable", error=str(error))
        return None
