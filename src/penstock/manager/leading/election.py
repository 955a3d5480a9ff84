"""Holds a manager's lease in the metadata store, and leads where leadership.py says so."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog
from pydantic import ValidationError

from penstock.core.cluster.leaders import LEADER, MANAGERS, LeaderRecord, ManagerRecord
from penstock.core.errors import Conflict, LeaseLost, NotLeader, PenstockError
from penstock.manager.leading.leadership import (
    BeginReign,
    Campaign,
    CampaignEnded,
    EndReign,
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
from penstock.manager.tasks import Tasks
from penstock.storage.metadata.base import Change, Compare, MetadataStore, Record, Snapshot, Write
from penstock.storage.metadata.following import follow

log = structlog.get_logger()
M = TypeVar("M", bound=ManagerRecord)
SOLE_LEASE_S = 86_400.0  # of a manager that has its store for itself
RESIGN_S = 1.0
MOST_TAKEN = 30  # after some seconds


class Election:
    def __init__(
        self,
        store: MetadataStore,
        manager: ManagerRecord,
        ttl_s: float,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change` is called when a reign begins or ends, and when others lead."""
        self._store = store
        self._manager = manager
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._clock = clock
        self._leadership = Leadership(ttl_s)
        self._tasks = Tasks("election")
        self._timer: asyncio.TimerHandle | None = None
        self._revoked: asyncio.Task[None] | None = None
        self._taken = 0  # how often another was found to have its name
        self.leader: LeaderRecord | None = None  # who leads as far as is known here
        self._leader_revision = 0
        self.managers: dict[str, ManagerRecord] = {}  # those that hold a lease

    def start(self) -> None:
        self._tasks.spawn(self._follow_leader())
        self._tasks.spawn(self._follow_managers())
        self._handle(TimePassed())

    async def close(self) -> None:
        """Resigns: another may lead at once."""
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
        """0: it does not lead, by the clock of this moment."""
        return self._leadership.epoch(self._clock())

    @property
    def leader_epoch(self) -> int:
        """Of whoever leads; 0: nobody is known to."""
        return self._leader_revision if self.leader is not None else 0

    @property
    def guard(self) -> Compare:
        """Goes with every write, so that a manager that no longer leads changes nothing."""
        if epoch := self.epoch:
            return Compare(LEADER, epoch)
        raise self.not_leading()

    def not_leading(self) -> NotLeader:
        leader = self.leader
        if leader is None or leader.address == self._manager.address:
            return NotLeader("no manager leads this cluster just now; try again", leader="")
        return NotLeader(
            f"manager '{leader.manager_id}' leads this cluster, at {leader.address}", leader=leader.address
        )

    # --- what happens

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
                self._tasks.spawn(self._grant())
            case KeepLease(lease):
                self._tasks.spawn(self._keep(lease))
            case Register(lease):
                self._tasks.spawn(self._register(lease))
            case Campaign(lease, expected):
                self._tasks.spawn(self._campaign(lease, expected))
            case RevokeLease(lease):
                self._revoked = self._tasks.spawn(self._revoke(lease))
            case BeginReign(epoch):
                log.info("reign_began", manager=self.manager_id, epoch=epoch, at_s=self._clock())
                self._on_change()
            case EndReign(epoch, why):
                log.warning("reign_ended", manager=self.manager_id, epoch=epoch, why=why, at_s=self._clock())
                self._on_change()

    async def _grant(self) -> None:
        sent_at = self._clock()
        try:
            lease = await self._store.grant(self._ttl_s)
        except PenstockError as error:
            log.warning("lease_not_granted", error=error.message)
            self._handle(LeaseCallFailed(0))
        else:
            self._handle(LeaseGranted(lease, self._ttl_s, sent_at))

    async def _keep(self, lease: int) -> None:
        sent_at = self._clock()
        try:
            left_s = await self._store.keep_alive(lease)
        except LeaseLost:
            self._handle(LeaseEnded(lease))
        except PenstockError as error:
            log.warning("lease_not_kept", error=error.message)
            self._handle(LeaseCallFailed(lease))
        else:
            self._handle(LeaseKept(lease, left_s, sent_at))

    async def _register(self, lease: int) -> None:
        key, value = f"{MANAGERS}{self.manager_id}", self._manager.model_dump_json().encode()
        try:
            found = await self._store.get(key)
            other = _read(ManagerRecord, found.value) if found is not None else None
            if other is not None and other.address != self._manager.address:
                self._name_taken(other)
                self._handle(Registered(lease, is_done=False))
                return
            await self._store.put(key, value, lease=lease)
        except LeaseLost:
            self._handle(LeaseEnded(lease))
        except PenstockError as error:
            log.warning("manager_not_registered", error=error.message)
            self._handle(Registered(lease, is_done=False))
        else:
            self._handle(Registered(lease, is_done=True))

    def _name_taken(self, other: ManagerRecord) -> None:
        """It may be of an earlier life, and ends soon; or somebody has forgotten to give each host its name."""
        self._taken += 1
        if self._taken == MOST_TAKEN:
            log.error("manager_name_taken", name=self.manager_id, by=other.address, advice="set --node on each host")

    async def _campaign(self, lease: int, expected: int) -> None:
        leader = LeaderRecord(**self._manager.model_dump(), lease=lease)
        try:
            revision = await self._store.commit(
                [Write(LEADER, leader.model_dump_json().encode(), lease)], [Compare(LEADER, expected)]
            )
        except LeaseLost:
            self._handle(LeaseEnded(lease))
        except PenstockError as error:
            if not isinstance(error, Conflict):
                log.warning("campaign_failed", error=error.message)
            self._handle(CampaignEnded(lease))
        else:
            self._leader_is(leader, revision)
            self._handle(CampaignEnded(lease))

    async def _revoke(self, lease: int) -> None:
        try:
            await self._store.revoke(lease)
        except PenstockError as error:
            log.warning("lease_not_revoked", error=error.message)  # it ends by itself

    async def _follow_leader(self) -> None:
        async for heard in follow(self._store, LEADER):
            if isinstance(heard, Snapshot) and heard.revision < self._leader_revision:
                log.warning("store_set_back", revision=heard.revision, before=self._leader_revision)
                self._leader_revision = 0
                self._handle(StoreSetBack())
            found = [each for each in _each(heard) if each.key == LEADER]
            if found:
                leader = _read(LeaderRecord, found[0].value)
                self._leader_is(leader, found[0].revision, is_there=found[0].value is not None)
            elif isinstance(heard, Snapshot):
                self._leader_is(None, heard.revision, is_there=False)

    def _leader_is(self, leader: LeaderRecord | None, revision: int, is_there: bool = True) -> None:
        if revision > self._leader_revision:
            self.leader, self._leader_revision = leader, revision
            self._handle(LeaderSeen(revision, leader.lease if leader else 0, is_there))
            self._on_change()

    async def _follow_managers(self) -> None:
        async for heard in follow(self._store, MANAGERS):
            if isinstance(heard, Snapshot):
                self.managers.clear()
            for each in _each(heard):
                manager_id = each.key.removeprefix(MANAGERS)
                self.managers.pop(manager_id, None)
                if found := _read(ManagerRecord, each.value):
                    self.managers[manager_id] = found


def _each(heard: Snapshot | Sequence[Change]) -> Sequence[Record | Change]:
    return heard.records if isinstance(heard, Snapshot) else heard


def _read(kind: type[M], value: bytes | None) -> M | None:
    """A record that cannot be read is of another version of Penstock: somebody leads, nobody knows where."""
    if value is None:
        return None
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        log.warning("manager_record_unreadable", error=str(error))
        return None
