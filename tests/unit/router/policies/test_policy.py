"""The policies: the chosen worker, the evenness, and that a thousand slots cost no more than ten."""

from collections import Counter
from itertools import pairwise
from math import exp
from random import Random
from typing import Any

import pytest

from penstock.core.settings import Routing
from penstock.router.policies.policy import SlotPolicy, make_policy
from penstock.router.slots import Slot
from tests.unit.router.tables import BLOCK, POLICIES


def policy(name: str, seed: int = 0) -> SlotPolicy:
    return make_policy(Routing.model_validate({"policy": name}), Random(seed).random)


def slots(count: int, credits: int = 1000) -> list[Slot]:
    return [Slot(b"%d" % n, BLOCK, credits, f"worker-{n}") for n in range(count)]


def fill(chooser: SlotPolicy, jobs: int) -> Counter[bytes]:
    """Start `jobs` jobs on the slots that the policy chooses; none ends."""
    given: Counter[bytes] = Counter()
    for _ in range(jobs):
        slot = chooser.choose(0.0)
        assert slot is not None
        slot.in_flight += 1
        chooser.update_job_count(slot)
        given[slot.worker] += 1
    return given


def listed(chooser: SlotPolicy, members: list[Slot]) -> SlotPolicy:
    for slot in members:
        chooser.add(slot)
    return chooser


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_chooses_among_its_slots_and_no_others(name: str) -> None:
    rng = Random(1)
    chooser, members = policy(name), slots(12)
    for n, slot in enumerate(members):
        slot.distance, slot.weight, slot.latency_s = n % 3, 1 + n % 4, 0.01 * (n % 5)
    inside: set[Slot] = set()
    assert chooser.choose(0.0) is None
    for step in range(3000):
        slot = rng.choice(members)
        if slot in inside and rng.random() < 0.3:
            inside.discard(slot)
            chooser.remove(slot)
        elif slot not in inside and rng.random() < 0.5:
            slot.in_flight = rng.randrange(5)  # possible while the policy does not know the slot
            inside.add(slot)
            chooser.add(slot)
        elif slot in inside:
            slot.in_flight = max(0, slot.in_flight + rng.choice((-1, 1)))
            chooser.update_job_count(slot)
        chosen = chooser.choose(float(step))
        assert (chosen in inside) if inside else chosen is None


def test_random_gives_every_slot_the_same_share() -> None:
    given = fill(listed(policy("random"), slots(10)), 10_000)
    assert len(given) == 10
    assert all(800 < count < 1200 for count in given.values())


def test_power_of_two_keeps_loads_close_together() -> None:
    given = fill(listed(policy("power_of_two"), slots(100)), 10_000)
    assert max(given.values()) - min(given.values()) <= 12  # with a purely random choice about 50


def test_power_of_two_compares_the_shares_of_credits_in_use() -> None:
    members = slots(10, credits=100)
    for slot in members[5:]:
        slot.credits = 400
    given = fill(listed(policy("power_of_two"), members), 1250)
    small = sum(given[slot.worker] for slot in members[:5])
    assert small < 400  # a quarter of the pairs are two small slots; by counts alone it would be half


def test_least_latency_chooses_the_faster_of_two_slots() -> None:
    members = slots(10)
    for slot in members:
        slot.record_latency(0.01, 0.0)
    members[0].record_latency(0.1, 0.0)
    chooser = listed(policy("least_latency"), members)
    given = Counter(chosen.worker for _ in range(10_000) if (chosen := chooser.choose(0.0)) is not None)
    assert given[b"0"] < 200  # only if both drawn slots are the slow one
    busy = members[1]
    busy.in_flight = 20
    assert sum(chooser.choose(0.0) is busy for _ in range(10_000)) < 200


def test_a_slow_slot_is_tried_again_after_a_while() -> None:
    members = slots(2)
    members[0].record_latency(0.01, 100.0)
    members[1].record_latency(0.1, 0.0)
    chooser = listed(policy("least_latency"), members)
    assert sum(chooser.choose(100.0) is members[1] for _ in range(1000)) > 500


def test_an_unmeasured_slot_gets_one_job_first() -> None:
    members = slots(2)
    members[0].record_latency(0.01, 0.0)
    chooser = listed(policy("least_latency"), members)
    newcomer = members[1]
    assert sum(chooser.choose(0.0) is newcomer for _ in range(1000)) > 700
    newcomer.in_flight = 1
    assert sum(chooser.choose(0.0) is newcomer for _ in range(1000)) < 300


def test_a_latency_rises_at_once_and_decays_slowly() -> None:
    (slot,) = slots(1)
    slot.record_latency(0.1, 0.0)
    slot.record_latency(0.5, 1.0)
    assert slot.latency_s == 0.5
    slot.record_latency(0.1, 11.0)  # after one decay time
    assert slot.latency_s == pytest.approx(0.1 + 0.4 * exp(-1))


def test_locality_chooses_the_nearest_slot_with_a_credit() -> None:
    members = slots(9)
    for n, slot in enumerate(members):
        slot.distance = n % 4  # 3 is as distant as 2
    chooser = listed(policy("locality"), members)
    for distance in (0, 1):
        near = [slot for slot in members if slot.distance == distance]
        assert {chooser.choose(0.0) for _ in range(200)} == set(near)
        for slot in near:
            chooser.remove(slot)
    assert {chooser.choose(0.0) for _ in range(200)} == {slot for slot in members if slot.distance >= 2}


def test_round_robin_takes_slots_in_turn() -> None:
    members = slots(4)
    chooser = listed(policy("round_robin"), members)
    assert [chooser.choose(0.0) for _ in range(8)] == members * 2


def test_no_slot_gets_two_turns_while_another_waits() -> None:
    """Even while slots are added and removed for lack of credits."""
    rng = Random(3)
    chooser, members = policy("round_robin"), slots(8)
    since: dict[Slot, Counter[Slot]] = {}  # turns of other slots since a slot's own, or since it was added
    for _ in range(20_000):
        slot = rng.choice(members)
        if slot in since:
            if rng.random() < 0.2:
                del since[slot]
                chooser.remove(slot)
        else:
            since[slot] = Counter()
            chooser.add(slot)
        chosen = chooser.choose(0.0)
        if chosen is None:
            continue
        for other, turns in since.items():
            turns[chosen] += 1
            assert turns[chosen] <= 1 or other is chosen
        since[chosen] = Counter()


def test_least_connections_always_chooses_one_of_the_emptiest() -> None:
    rng = Random(4)
    chooser, members = policy("least_connections"), slots(30)
    listed(chooser, members)
    for _ in range(20_000):
        slot = rng.choice(members)
        if slot.in_flight and rng.random() < 0.6:
            slot.in_flight -= 1
            chooser.update_job_count(slot)
        chosen = chooser.choose(0.0)
        assert chosen is not None
        assert chosen.in_flight == min(slot.in_flight for slot in members)
        chosen.in_flight += 1
        chooser.update_job_count(chosen)


def test_turns_are_proportional_to_weights() -> None:
    members = slots(3)
    for slot, weight in zip(members, (1.0, 2.0, 5.0), strict=True):
        slot.weight = weight
    given = fill(listed(policy("weighted"), members), 800)
    assert [given[slot.worker] for slot in members] == pytest.approx([100, 200, 500], abs=1)


def test_turns_of_heavy_slots_are_spread_out() -> None:
    light, heavy = slots(2)
    heavy.weight = 4.0
    chooser = listed(policy("weighted"), [light, heavy])
    turns = [n for n in range(400) if chooser.choose(0.0) is light]
    assert {later - earlier for earlier, later in pairwise(turns)} == {5}


def test_a_new_or_returning_slot_does_not_catch_up() -> None:
    members = slots(3)
    chooser = listed(policy("weighted"), members[:2])
    fill(chooser, 1000)
    chooser.remove(members[1])
    fill(chooser, 1000)
    chooser.add(members[1])
    chooser.add(members[2])
    given = fill(chooser, 300)
    assert [given[slot.worker] for slot in members] == pytest.approx([100, 100, 100], abs=1)


def test_slots_without_credits_do_not_affect_the_turns() -> None:
    members = slots(4)
    chooser = listed(policy("weighted"), members)
    for _ in range(5000):
        chooser.remove(members[0])
        chooser.add(members[0])
    assert len(chooser._turns) <= 2 * 4 + 65  # type: ignore[attr-defined]


class Watched(Slot):
    """A list that counts how often a slot is read."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.looks += 1
        return super().__getattribute__(name)


def looks(name: str, workers: int) -> float:
    """Return how many slots a decision reads.

    A decision takes a credit and gives it back, and a slot without credits is removed and added again.
    """
    chooser = policy(name, seed=workers)
    members = [Watched(b"%d" % n, BLOCK, 4, f"worker-{n}") for n in range(workers)]
    listed(chooser, [*members])
    Watched.looks = 0
    for step in range(2000):
        slot = chooser.choose(float(step))
        assert slot is not None
        slot.in_flight += 1
        chooser.update_job_count(slot)
        if step % 4 == 0:
            chooser.remove(slot)
            chooser.add(slot)
        slot.in_flight -= 1
        chooser.update_job_count(slot)
    return Watched.looks / 2000


@pytest.mark.parametrize("name", POLICIES)
def test_a_decision_reads_as_many_of_a_thousand_slots_as_of_ten(name: str) -> None:
    few, many = looks(name, 10), looks(name, 1000)
    assert many <= 1.05 * few, f"{few} looks among 10 slots, {many} among 1,000"
