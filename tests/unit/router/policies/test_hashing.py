"""Owners of keys: a joining or leaving worker moves only its own keys."""

from collections import Counter
from random import Random

import pytest

from penstock.core.cluster.rendezvous import PARTITIONS, compute_partition, find_owner
from penstock.core.errors import InvalidRequest, QueueFull
from penstock.core.requests import Controls, SessionStep
from penstock.core.settings import BlockSettings, Sessions
from penstock.router.actions import CountRetry
from penstock.router.jobs import JobTable
from penstock.router.policies.hashing import KeyOwners
from penstock.router.slots import Offer, Slot
from tests.unit.router.tables import BLOCK, A, B, C, job, join, rules, sent, table

KEYS = [f"key-{n}" for n in range(3000)]


def slot(name: str) -> Slot:
    return Slot(name.encode(), BLOCK, 4, name)


def places(members: list[Slot]) -> KeyOwners:
    made = KeyOwners()
    for member in members:
        made.add(member)
    return made


def owners(found: KeyOwners) -> dict[str, str]:
    named = {key: found.find_owner(key) for key in KEYS}
    return {key: owner.name for key, owner in named.items() if owner is not None}


def test_without_workers_a_key_has_no_owner() -> None:
    found = places([slot("w-0")])
    found.remove(next(iter(found._seeds)))
    assert found.find_owner("x") is None


def test_every_key_has_an_owner_and_owners_share_the_keys() -> None:
    shares = Counter(owners(places([slot(f"w-{n}") for n in range(10)])).values())
    assert sum(shares.values()) == len(KEYS)
    assert len(shares) == 10
    assert all(200 < count < 400 for count in shares.values())


def test_a_lost_worker_moves_only_its_own_keys() -> None:
    members = [slot(f"w-{n}") for n in range(8)]
    found = places(members)
    before = owners(found)
    found.remove(members[3])
    after = owners(found)
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if before[key] == "w-3"}
    assert len({after[key] for key in moved}) == 7  # they are spread over all remaining workers


def test_a_joining_worker_takes_only_its_own_keys() -> None:
    found = places([slot(f"w-{n}") for n in range(7)])
    before = owners(found)
    found.add(slot("w-7"))
    after = owners(found)
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if after[key] == "w-7"}
    assert moved
    assert len({before[key] for key in moved}) == 7  # every worker gave some keys


def test_a_returning_worker_gets_its_keys_back() -> None:
    members = [slot(f"w-{n}") for n in range(5)]
    found = places(members)
    before = owners(found)
    found.remove(members[2])
    found.find_owner("x")
    found.add(slot("w-2"))  # its next connection
    assert owners(found) == before


def test_a_long_history_gives_the_same_owners_as_a_fresh_start() -> None:
    rng = Random(5)
    members = [slot(f"w-{n}") for n in range(20)]
    inside = list(members)
    found = places(inside)
    for _ in range(200):
        member = rng.choice(members)
        if member in inside and len(inside) > 1:
            inside.remove(member)
            found.remove(member)
        elif member not in inside:
            inside.append(member)
            found.add(member)
        found.find_owner("x")
    rng.shuffle(inside)
    assert owners(found) == owners(places(inside))


def test_keys_are_distributed_over_all_places() -> None:
    hit = Counter(compute_partition(f"{n}") for n in range(100 * PARTITIONS))
    assert len(hit) == PARTITIONS
    assert 40 < min(hit.values()) <= max(hit.values()) < 180


def test_every_gateway_computes_the_same_owner() -> None:
    """Owners are part of the contract between gateways: they must agree, whatever their versions."""
    assert [compute_partition(key) for key in ("", "a", "customer-42", "ключ")] == [692, 559, 3114, 2080]
    found = places([slot(f"worker-{n}") for n in range(4)])
    assert [owner.name for key in "abcdefgh" if (owner := found.find_owner(key))] == [
        f"worker-{n}" for n in (3, 2, 0, 2, 1, 0, 3, 2)
    ]


# --- in the table


def keyed(max_queue: int = 100, without_key: str = "any", key: str = "") -> JobTable:
    made = table(rules("hash", max_queue, without_key=without_key, key=key))
    for worker in (A, B, C):
        join(made, worker, 2)
    return made


def key_of(jobs: JobTable, worker: bytes, skip: int = 0) -> str:
    """Return a key that the worker owns."""
    return [key for key in KEYS if jobs.find_owner(BLOCK, key) == worker][skip]


def test_jobs_with_a_key_wait_for_their_owner_even_without_credits() -> None:
    jobs = keyed()
    key = key_of(jobs, B)
    assert [sent(jobs.submit(job(n, key=key), 0.0)) for n in range(3)] == [[(B, 0)], [(B, 1)], []]
    assert jobs.count_jobs()[BLOCK][0] == 1
    assert sent(jobs.submit(job(3, key=key_of(jobs, A)), 0.0)) == [(A, 3)]  # jobs that wait for B do not delay A
    assert sent(jobs.complete(A, 3, 1, 1.0)[1]) == []
    assert sent(jobs.complete(B, 1, 1, 1.0)[1]) == [(B, 2)]


def test_jobs_waiting_for_one_worker_count_in_max_queue() -> None:
    jobs = keyed(max_queue=2)
    key = key_of(jobs, B)
    for n in range(4):
        jobs.submit(job(n, key=key), 0.0)
    with pytest.raises(QueueFull):
        jobs.submit(job(4, key=key), 0.0)
    assert sent(jobs.submit(job(5), 0.0))  # it does not have to wait


def test_jobs_waiting_for_a_leaving_worker_are_placed_again() -> None:
    jobs = keyed()
    first, second = key_of(jobs, B), key_of(jobs, B, 7)
    for n in range(6):
        jobs.submit(job(n, key=first if n % 2 else second), 0.0)
    actions = jobs.leave(B, 1.0)
    lost = [action.job.job_id for action in actions if isinstance(action, CountRetry)]
    assert sorted(lost) == [0, 1]
    where = {n: worker for worker, n in sent(actions)}
    for n, worker in where.items():
        assert worker == jobs.find_owner(BLOCK, first if n % 2 else second)
    assert {0, 1} <= set(where)  # these had run, and are sent first
    assert len(where) + jobs.count_jobs()[BLOCK][0] == 6


def test_jobs_waiting_for_a_draining_worker_are_placed_again() -> None:
    jobs = keyed()
    key = key_of(jobs, B)
    for n in range(3):
        jobs.submit(job(n, key=key), 0.0)
    actions = jobs.join(B, [], 1.0)
    assert sent(actions) == [(jobs.find_owner(BLOCK, key), 2)]
    assert jobs.count_jobs()[BLOCK][1] == 3


def test_jobs_with_a_key_wait_for_the_first_worker_and_move_to_the_owner() -> None:
    jobs = table(rules("hash", 100))
    for n in range(40):
        jobs.submit(job(n, key=KEYS[n]), 0.0)
    ((_, first),) = sent(join(jobs, A, 1))
    assert first == 0
    started = sent(join(jobs, B, 50))
    owned = [n for n in range(1, 40) if jobs.find_owner(BLOCK, KEYS[n]) == B]
    assert started == [(B, n) for n in owned]
    assert owned
    assert jobs.count_jobs()[BLOCK][0] == 39 - len(owned)


def test_the_last_workers_jobs_wait_for_the_next_worker() -> None:
    jobs = table(rules("hash", 100))
    join(jobs, A, 1)
    for n in range(3):
        jobs.submit(job(n, key="x"), 0.0)
    jobs.leave(A, 1.0)
    assert jobs.count_jobs()[BLOCK][0] == 3
    assert sent(join(jobs, B, 5, 2.0)) == [(B, 0), (B, 1), (B, 2)]


def test_a_request_without_a_key_is_sent_to_any_worker() -> None:
    jobs = keyed()
    assert len({worker for n in range(6) for worker, _ in sent(jobs.submit(job(n), 0.0))}) == 3


def test_a_request_without_a_key_is_refused_if_the_model_requires_one() -> None:
    jobs = keyed(without_key="refuse", key="customer")
    with pytest.raises(InvalidRequest, match="'customer'"):
        jobs.submit(job(1), 0.0)
    assert len(jobs) == 0
    with pytest.raises(InvalidRequest, match="'session_id'"):
        keyed(without_key="refuse").submit(job(1), 0.0)
    assert sent(jobs.submit(job(1, session="s"), 0.0)) == [(jobs.find_owner(BLOCK, "s"), 1)]


@pytest.mark.parametrize("policy", ["power_of_two", "round_robin", "weighted", "least_connections", "hash"])
def test_a_session_stays_on_one_worker_under_every_policy(policy: str) -> None:
    jobs = table(rules(policy, 100))
    for worker in (A, B, C):
        join(jobs, worker, 2)
    home = jobs.find_owner(BLOCK, "s-1")
    assert home is not None
    assert [sent(jobs.submit(job(n, session="s-1"), 0.0)) for n in range(3)] == [[(home, 0)], [(home, 1)], []]
    assert sent(jobs.complete(home, 0, 1, 1.0)[1]) == [(home, 2)]


def test_a_shard_key_is_ignored_by_other_policies() -> None:
    jobs = table(rules("round_robin", 100))
    for worker in (A, B, C):
        join(jobs, worker, 2)
    assert len({worker for n in range(3) for worker, _ in sent(jobs.submit(job(n, key="x"), 0.0))}) == 3


def test_a_session_stays_with_its_worker_when_another_gets_its_place() -> None:
    jobs = table(rules(max_queue=100))
    join(jobs, A, 2)
    both = places([slot("worker-a"), slot("worker-b")])
    moved = next(key for key in KEYS if (owner := both.find_owner(key)) and owner.name == "worker-b")
    first = job(1, session=moved)
    jobs.submit(first, 0.0)
    done, _ = jobs.complete(A, 1, 1, 0.0)
    assert done is first
    home = done.home
    assert home == A
    join(jobs, B, 2)
    assert jobs.find_owner(BLOCK, moved) == B
    assert sent(jobs.submit(job(2, session=moved, home=home), 0.0)) == [(A, 2)]
    jobs.leave(A, 1.0)
    assert sent(jobs.submit(job(3, session=moved, home=home), 1.0)) == [(B, 3)]


def test_a_session_is_on_its_hashs_worker_unless_the_model_keeps_state() -> None:
    """Every gateway finds the same worker, and a returning worker gets its sessions back."""
    stateful, plain = BlockSettings(sessions=Sessions(is_stateful=True)), BlockSettings()
    for settings, is_start, home in ((plain, False, b""), (stateful, False, A), (stateful, True, b"")):
        made = job(1)
        made.apply_controls(Controls(session=SessionStep("s-1", 3, is_start, home=A)), settings, 0.0)
        assert (made.session, made.home, made.is_bound) == ("s-1", home, bool(home))
    jobs = table(rules(max_queue=100))
    for worker in (A, B, C):
        join(jobs, worker, 2)
    home_of = jobs.find_owner(BLOCK, "s-1")
    assert home_of is not None
    jobs.leave(home_of, 1.0)
    assert jobs.find_owner(BLOCK, "s-1") not in (None, home_of)
    join(jobs, home_of, 2)
    assert jobs.find_owner(BLOCK, "s-1") == home_of


def test_the_older_of_a_bound_and_an_unbound_job_is_sent_first() -> None:
    jobs = table(rules("hash", 100))
    join(jobs, A, 1)
    jobs.submit(job(1, key="x"), 0.0)
    jobs.submit(job(2), 1.0)
    jobs.submit(job(3, key="x"), 2.0)
    jobs.submit(job(4), 3.0)
    order = []
    running = 1
    for _ in range(3):
        ((_, running),) = sent(jobs.complete(A, running, 1, 4.0)[1])
        order.append(running)
    assert order == [2, 3, 4]


def test_a_worker_keeps_its_keys_over_a_new_connection() -> None:
    jobs = keyed()
    key = key_of(jobs, B)
    jobs.leave(B, 1.0)
    jobs.join(b"another socket", [Offer(BLOCK, 2, B.decode())], 2.0)
    assert jobs.find_owner(BLOCK, key) == b"another socket"


def test_the_owner_depends_on_names_only() -> None:
    names = [f"w-{n}" for n in range(7)]
    found = owners(places([slot(name) for name in names]))
    assert found == {key: find_owner(names, key) for key in KEYS}
    assert find_owner([], "x") == ""
