"""Leadership by scripts of events and with a simulated store: two managers never lead at once."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import pytest

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

TTL_S = 2.0


def leading() -> Leadership:
    """Return a leadership that leads since 10.1 with epoch 7, by a lease that was requested at 10."""
    leadership = Leadership(TTL_S)
    assert leadership.handle(TimePassed(), 10.0) == [GrantLease()]
    assert leadership.handle(LeaderSeen(5, 0, exists=False), 10.0) == []
    assert leadership.handle(LeaseGranted(1, TTL_S, 10.0), 10.1) == [Register(1), Campaign(1, 0)]
    assert leadership.handle(LeaderSeen(7, 1, exists=True), 10.1) == [BeginTerm(7)]
    assert leadership.handle(CampaignEnded(1), 10.1) == []
    assert leadership.handle(Registered(1, is_done=True), 10.1) == []
    return leadership


def test_leading_lasts_from_the_request_of_the_lease() -> None:
    leadership = leading()
    assert leadership.compute_epoch(11.79) == 7
    assert leadership.compute_epoch(11.8) == 0
    assert leadership.compute_epoch(11.81) == 0, "even before an event says that time passed"
    assert leadership.handle(TimePassed(), 11.81) == [
        EndTerm(7, "the metadata store did not renew the lease in time"),
        KeepLease(1),
    ]


def test_leading_is_prolonged_from_the_time_of_the_request() -> None:
    leadership = leading()
    assert leadership.wake_at == 10.5
    assert leadership.handle(TimePassed(), 10.5) == [KeepLease(1)]
    assert leadership.handle(LeaseKept(1, TTL_S, 10.5), 11.6) == [KeepLease(1)], "the next renewal is due"
    assert leadership.compute_epoch(12.29) == 7
    assert leadership.compute_epoch(12.31) == 0


@pytest.mark.parametrize("is_told", [True, False])
def test_a_late_answer_starts_a_new_epoch_with_the_same_lease(is_told: bool) -> None:
    leadership = leading()
    leadership.handle(TimePassed(), 10.5)
    ended = EndTerm(7, "the metadata store did not renew the lease in time")
    assert not is_told or leadership.handle(TimePassed(), 12.0) == [ended]
    actions = leadership.handle(LeaseKept(1, TTL_S, 10.5), 12.1)
    assert actions == [*([] if is_told else [ended]), KeepLease(1), Campaign(1, 7)]
    assert leadership.compute_epoch(12.1) == 0
    assert leadership.handle(LeaderSeen(8, 1, exists=True), 12.2) == [BeginTerm(8)]


def test_an_answer_at_the_very_end_of_the_time_starts_a_new_epoch() -> None:
    leadership = leading()
    leadership.handle(TimePassed(), 10.5)
    actions = leadership.handle(LeaseKept(1, TTL_S, 10.5), 11.8)
    assert actions == [EndTerm(7, "the metadata store did not renew the lease in time"), KeepLease(1), Campaign(1, 7)]


def test_an_answer_never_shortens_the_time_to_lead() -> None:
    leadership = leading()
    leadership.handle(LeaseKept(1, TTL_S, 10.5), 10.6)
    leadership.handle(LeaseKept(1, 0.5, 10.6), 10.7)
    assert leadership.compute_epoch(12.2) == 7


def test_answers_to_other_leases_change_nothing() -> None:
    leadership = Leadership(TTL_S)
    leadership.handle(TimePassed(), 0.0)
    assert leadership.handle(LeaderSeen(5, 0, exists=True), 0.0) == [], "a record without a lease belongs to no manager"
    assert leadership.handle(LeaseGranted(1, TTL_S, 0.0), 0.0) == [Register(1)]
    assert leadership.handle(LeaderSeen(6, 0, exists=False), 0.0) == [Campaign(1, 0)]
    assert leadership.handle(TimePassed(), 0.5) == [KeepLease(1)]
    for event in (
        LeaseKept(9, 9.0, 0.5),
        LeaseCallFailed(9),
        Registered(9, True),
        Registered(9, False),
        CampaignEnded(9),
    ):
        assert leadership.handle(event, 0.5) == []
    assert leadership.handle(TimePassed(), 1.0) == [], "the calls are still pending"
    assert leadership.wake_at == float("inf")
    assert leadership.handle(LeaderSeen(7, 1, exists=True), 1.0) == [BeginTerm(7)]
    assert (leadership.compute_epoch(1.79), leadership.compute_epoch(1.81)) == (7, 0)
    assert leadership.wake_at == pytest.approx(1.8)


def test_each_call_is_repeated_a_fifth_of_a_second_after_its_failure() -> None:
    leadership = Leadership(40.0)
    assert leadership.wake_at == 0.0
    assert leadership.handle(TimePassed(), 0.0) == [GrantLease()]
    assert leadership.wake_at == float("inf")
    leadership.handle(LeaseCallFailed(0), 0.0)
    assert leadership.wake_at == 0.2
    assert leadership.handle(TimePassed(), 0.2) == [GrantLease()]
    leadership.handle(LeaderSeen(5, 0, exists=False), 0.2)
    assert leadership.handle(LeaseGranted(1, 60.0, 0.2), 0.25) == [Register(1), Campaign(1, 0)]
    assert leadership.wake_at == pytest.approx(10.2), "renewals are due after a quarter of the lease"
    leadership.handle(Registered(1, is_done=False), 0.5)
    assert leadership.wake_at == 0.7
    assert leadership.handle(TimePassed(), 0.6) == []
    assert leadership.handle(TimePassed(), 0.7) == [Register(1)]
    leadership.handle(Registered(1, is_done=True), 0.8)
    leadership.handle(CampaignEnded(1), 1.0)
    assert leadership.wake_at == 1.2
    assert leadership.handle(TimePassed(), 1.1) == []
    assert leadership.handle(TimePassed(), 1.2) == [Campaign(1, 0)]
    leadership.handle(CampaignEnded(1), 2.0)
    assert leadership.handle(LeaderSeen(6, 0, exists=False), 2.1) == [Campaign(1, 0)], "the record `leader` was deleted"


def test_lower_revisions_count_after_the_store_was_set_back() -> None:
    leadership = leading()
    assert leadership.handle(StoreSetBack(), 10.2) == [EndTerm(7, "another manager leads")]
    assert leadership.handle(LeaderSeen(1, 0, exists=False), 10.2) == [Campaign(1, 0)]
    assert leadership.handle(LeaderSeen(3, 1, exists=True), 10.3) == [BeginTerm(3)]


def test_an_answer_after_the_lease_ended_does_not_prolong_it() -> None:
    leadership = leading()
    leadership.handle(TimePassed(), 10.5)
    assert leadership.handle(LeaseKept(1, TTL_S, 10.5), 15.0) == [
        EndTerm(7, "the metadata store did not renew the lease in time"),
        KeepLease(1),
    ]
    assert leadership.handle(LeaseEnded(1), 15.1) == [GrantLease()]
    assert leadership.handle(LeaseGranted(2, TTL_S, 15.1), 15.2) == [Register(2)], "a manager may lead"
    assert leadership.handle(LeaderSeen(9, 0, exists=False), 15.3) == [Campaign(2, 0)]
    assert leadership.handle(LeaseEnded(2), 15.4) == [GrantLease()]
    assert leadership.handle(LeaseGranted(3, TTL_S, 15.4), 15.5) == [Register(3), Campaign(3, 0)]


def test_leading_ends_when_another_manager_has_the_record() -> None:
    leadership = leading()
    assert leadership.handle(LeaderSeen(9, 33, exists=True), 10.2) == [EndTerm(7, "another manager leads")]
    assert leadership.compute_epoch(10.2) == 0


def test_old_events_change_nothing() -> None:
    leadership = leading()
    for event in (LeaderSeen(6, 0, exists=False), LeaderSeen(7, 0, exists=False), LeaseEnded(99)):
        assert leadership.handle(event, 10.2) == []
    assert leadership.compute_epoch(10.2) == 7


def test_a_campaign_without_an_answer_is_won_when_the_record_is_seen() -> None:
    leadership = Leadership(TTL_S)
    leadership.handle(TimePassed(), 10.0)
    leadership.handle(LeaderSeen(5, 0, exists=False), 10.0)
    leadership.handle(LeaseGranted(1, TTL_S, 10.0), 10.0)
    assert leadership.handle(CampaignEnded(1), 10.1) == []
    assert leadership.handle(LeaderSeen(6, 1, exists=True), 10.2) == [BeginTerm(6)]


def test_failed_calls_are_repeated_after_a_while() -> None:
    leadership = Leadership(TTL_S)
    leadership.handle(TimePassed(), 10.0)
    assert leadership.handle(LeaseCallFailed(0), 10.1) == []
    assert leadership.handle(TimePassed(), leadership.wake_at) == [GrantLease()]
    leadership.handle(LeaderSeen(5, 0, exists=False), 10.4)
    leadership.handle(LeaseGranted(1, TTL_S, 10.4), 10.4)
    leadership.handle(CampaignEnded(1), 10.4)
    leadership.handle(Registered(1, is_done=False), 10.4)
    assert leadership.handle(TimePassed(), leadership.wake_at) == [Register(1), Campaign(1, 0)]


def test_a_resigning_leader_stops_leading_before_it_revokes_its_lease() -> None:
    leadership = leading()
    assert leadership.handle(Resigning(), 10.2) == [
        EndTerm(7, "manager is shutting down", is_resigning=True),
        RevokeLease(1),
    ]
    assert leadership.compute_epoch(10.2) == 0
    assert leadership.handle(LeaseKept(1, TTL_S, 10.2), 10.3) == []
    assert leadership.wake_at == float("inf")


def test_a_manager_that_does_not_lead_resigns_with_its_lease_alone() -> None:
    leadership = Leadership(TTL_S)
    leadership.handle(TimePassed(), 10.0)
    assert leadership.handle(LeaseGranted(1, TTL_S, 10.0), 10.1) == [Register(1)], (
        "the state of the record is not known yet"
    )
    assert leadership.handle(Resigning(), 10.2) == [RevokeLease(1)]
    assert Leadership(TTL_S).handle(Resigning(), 10.0) == []


# --- simulated


@dataclass
class SimulatedStore:
    """Leases by the true clock; ended leases are removed at intervals, as etcd does."""

    revision: int = 1
    leases: dict[int, float] = field(default_factory=dict)
    leader: tuple[int, int] | None = None  # lease, revision
    last_lease: int = 0

    def expire(self, now: float) -> bool:
        self.leases = {lease: ends_at for lease, ends_at in self.leases.items() if ends_at > now}
        if self.leader is not None and self.leader[0] not in self.leases:
            self.leader = None
            self.revision += 1
            return True
        return False


class Simulation:
    def __init__(self, seed: int, managers: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.store = SimulatedStore()
        self.faults = 0.25  # the share of calls that are lost, or whose answers are lost
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.managers = [SimulatedManager(self, number) for number in range(managers)]
        self.epochs: list[int] = []

    def at(self, time: float, act: Callable[[], None]) -> None:
        heappush(self._events, (time, next(self._order), act))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heappop(self._events)
            act()
            leaders = [manager for manager in self.managers if manager.leadership.compute_epoch(manager.clock())]
            assert len(leaders) <= 1, f"two lead at {self.now}"
        self.now = until

    def delay_s(self) -> float:
        return self.rng.choice([0.001, 0.01, 0.2, 1.0, 3.0]) * self.rng.random()

    def expire(self) -> None:
        if self.store.expire(self.now):
            self.tell_all()
        self.at(self.now + 0.5, self.expire)

    def tell_all(self) -> None:
        for manager in self.managers:
            manager.tell_leader()


class SimulatedManager:
    def __init__(self, simulation: Simulation, number: int) -> None:
        self.simulation = simulation
        self.leadership = Leadership(TTL_S)
        self.paused_until = 0.0
        self._rate = 1.0 + simulation.rng.uniform(-0.02, 0.02)  # of its clock
        self._start = simulation.rng.uniform(0, 1e6)

    def clock(self) -> float:
        return self._start + self.simulation.now * self._rate

    def handle(self, event: LeadershipEvent) -> None:
        if self.simulation.now < self.paused_until:
            self.simulation.at(self.paused_until, lambda: self.handle(event))
            return
        for action in self.leadership.handle(event, self.clock()):
            self.perform(action)
        wait_s = (self.leadership.wake_at - self.clock()) / self._rate
        if 0 <= wait_s < 1e6:
            self.simulation.at(self.simulation.now + wait_s + 1e-6, lambda: self.handle(TimePassed()))

    def perform(self, action: LeadershipAction) -> None:
        sent_at = self.clock()
        match action:
            case GrantLease():
                self.call(lambda: self.grant(sent_at), LeaseCallFailed(0))
            case KeepLease(lease):
                self.call(lambda: self.keep(lease, sent_at), LeaseCallFailed(lease))
            case Register(lease):
                self.call(lambda: Registered(lease, is_done=True), Registered(lease, is_done=False))
            case Campaign(lease, expected):
                self.call(lambda: self.campaign(lease, expected), CampaignEnded(lease))
            case BeginTerm(epoch):
                assert not self.simulation.epochs or epoch > self.simulation.epochs[-1], "each term has its own epoch"
                self.simulation.epochs.append(epoch)

    def call(self, act: Callable[[], LeadershipEvent], failure: LeadershipEvent) -> None:
        simulation = self.simulation

        def arrive() -> None:
            answer = act()
            self.answer(failure if simulation.rng.random() < simulation.faults else answer)

        if simulation.rng.random() < simulation.faults:
            self.answer(failure)
        else:
            simulation.at(simulation.now + simulation.delay_s(), arrive)

    def answer(self, event: LeadershipEvent) -> None:
        self.simulation.at(self.simulation.now + self.simulation.delay_s(), lambda: self.handle(event))

    def tell_leader(self) -> None:
        leader = self.simulation.store.leader
        seen = LeaderSeen(
            leader[1] if leader else self.simulation.store.revision, leader[0] if leader else 0, bool(leader)
        )
        self.answer(seen)

    def grant(self, sent_at: float) -> LeadershipEvent:
        store = self.simulation.store
        store.last_lease += 1
        store.leases[store.last_lease] = self.simulation.now + TTL_S
        return LeaseGranted(store.last_lease, TTL_S, sent_at)

    def keep(self, lease: int, sent_at: float) -> LeadershipEvent:
        store = self.simulation.store
        if store.leases.get(lease, 0.0) <= self.simulation.now:
            return LeaseEnded(lease)
        store.leases[lease] = self.simulation.now + TTL_S
        return LeaseKept(lease, TTL_S, sent_at)

    def campaign(self, lease: int, expected: int) -> LeadershipEvent:
        store = self.simulation.store
        if lease not in store.leases:
            return LeaseEnded(lease)
        if (store.leader[1] if store.leader else 0) == expected:
            store.revision += 1
            store.leader = (lease, store.revision)
            self.simulation.tell_all()
        return CampaignEnded(lease)


@pytest.mark.parametrize("seed", range(30))
def test_two_managers_never_lead_at_once(seed: int) -> None:
    simulation = Simulation(seed, managers=3)
    simulation.expire()
    for manager in simulation.managers:
        manager.handle(TimePassed())
        manager.tell_leader()
    for _ in range(40):
        simulation.run(simulation.now + simulation.rng.uniform(0.2, 6.0))
        stopped = simulation.rng.choice(simulation.managers)
        stopped.paused_until = simulation.now + simulation.rng.choice([0.1, 1.0, 1.9, 2.5, 10.0])
    assert len(set(simulation.epochs)) > 3
    simulation.faults = 0.0
    simulation.delay_s = lambda: 0.001  # type: ignore[method-assign]
    simulation.run(simulation.now + 20.0)
    assert [manager for manager in simulation.managers if manager.leadership.compute_epoch(manager.clock())]
