"""Who holds what: by hand for each rule, and over random clusters for what always holds."""

from collections.abc import Iterable, Mapping
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.chaos.cluster.placement import fullest_of, held_by, moved
from penstock.manager.placing.placement import Placement, _order, _Placing, place
from penstock.manager.placing.sites import GIB, BlockDemand, SharedCapacity, WorkerCapacity

Held = Mapping[str, Iterable[str]]


def workers(*names: str) -> list[WorkerCapacity]:
    return [WorkerCapacity(name) for name in names]


def said(placed: Placement, block_id: str = "a") -> str:
    return "\n".join(placed.explain(block_id))


# --- each rule


def test_a_block_without_a_number_of_replicas_is_on_every_worker_that_may_hold_it() -> None:
    with_gpu = WorkerCapacity("w3", labels={"gpu": "yes"})
    blocks = [BlockDemand("a"), BlockDemand("b", labels={"gpu": "yes"})]
    placed = place(blocks, [*workers("w1", "w2"), with_gpu], {})
    assert placed.holders == {"a": ("w1", "w2", "w3"), "b": ("w3",)}
    assert "w1 and w2 not: the block wants gpu=yes, and it has no gpu." in placed.explain("b")


def test_what_is_held_stays_and_what_is_missing_goes_to_the_emptiest() -> None:
    blocks = [BlockDemand("a", 1), BlockDemand("b", 1), BlockDemand("c", 2)]
    placed = place(blocks, workers("w1", "w2", "w3"), {"a": ["w1"], "b": ["w1"], "c": ["w2"]})
    assert placed.holders["c"] == ("w2", "w3")
    assert placed.holders["a"] == placed.holders["b"] == ("w1",)


def test_labels_may_name_a_worker_a_host_or_a_zone_and_a_key_alone() -> None:
    there = [WorkerCapacity("w1", "h1", "z1"), WorkerCapacity("w2", "h2", "z2", labels={"ssd": "fast"})]
    wanted = ({"worker": "w2"}, {"host": "h2"}, {"zone": "z2"}, {"ssd": ""})
    for labels in wanted:
        assert place([BlockDemand("a", labels=labels)], there, {}).holders == {"a": ("w2",)}


def test_a_worker_is_never_given_more_than_it_has() -> None:
    small = [WorkerCapacity(f"w{n}", cpu=4, memory_bytes=8 * GIB, gpu_memory_bytes=0) for n in range(2)]
    blocks = [BlockDemand(f"b{n}", 1, cpu=1, memory_bytes=3 * GIB) for n in range(5)]
    placed = place(blocks, small, {})
    assert sum(placed.missing.values()) == 1
    assert all(held_by(placed.holders, worker) == 2 for worker in small)
    lonely = next(iter(placed.missing))
    assert "needs 3 GiB of memory, and 2 of 8 are free" in said(placed, lonely)
    assert "needs a GPU, and it has none" in said(place([BlockDemand("a", 1, gpu_memory_bytes=1)], small, {}))


def test_workers_of_one_machine_are_never_given_more_than_it_has() -> None:
    """Each may take all of the machine, and one of them no more than its control group leaves it."""
    machine = SharedCapacity("h0", cpus=4, memory_bytes=8 * GIB)
    group = SharedCapacity("h0/group", memory_bytes=2 * GIB)
    there = [
        WorkerCapacity("w0", "h0", cpu=4, memory_bytes=8 * GIB, shared=(machine,)),
        WorkerCapacity("w1", "h0", cpu=4, memory_bytes=2 * GIB, shared=(machine, group)),
        WorkerCapacity("w2", "h0", cpu=4, memory_bytes=2 * GIB, shared=(machine, group)),
    ]
    small = [BlockDemand(f"b{n}", 1, memory_bytes=GIB) for n in range(6)]
    placed = place(small, there, {})
    assert not placed.missing
    assert held_by(placed.holders, there[1]) + held_by(placed.holders, there[2]) == 2
    large = BlockDemand("z", 1, memory_bytes=3 * GIB)
    with_large = place([*small, large], there, placed.holders)
    assert with_large.missing == {"z": 1}
    assert "w0 not: the block needs 3 GiB of memory, and 2 of 8 are free on its machine." in with_large.explain("z")
    everywhere = place([BlockDemand("a", cpu=3)], there, {})
    assert everywhere.holders == {"a": ("w0",)}
    assert "1 of 4 cores are left" in said(everywhere)


def test_what_two_workers_of_a_machine_hold_beyond_it_goes_elsewhere() -> None:
    machine = SharedCapacity("h0", memory_bytes=8 * GIB)
    there = [WorkerCapacity(f"w{n}", "h0", memory_bytes=8 * GIB, shared=(machine,)) for n in range(2)]
    blocks = [BlockDemand(name, 1, memory_bytes=5 * GIB) for name in "ab"]
    placed = place(blocks, [*there, WorkerCapacity("w2", "h1", memory_bytes=8 * GIB)], {"a": ["w0"], "b": ["w1"]})
    assert placed.holders == {"a": ("w0",), "b": ("w2",)}


def test_workers_of_one_name_on_two_machines_are_apart() -> None:
    there = [WorkerCapacity(f"w{n}", "fleet", machine=f"fleet/{n // 2}") for n in range(4)]
    placed = place([BlockDemand("a", 2)], there, {})
    assert len({int(worker[1:]) // 2 for worker in placed.holders["a"]}) == 2


def test_one_block_makes_room_for_a_large_one() -> None:
    there = [WorkerCapacity("w1", memory_bytes=8 * GIB), WorkerCapacity("w2", memory_bytes=8 * GIB)]
    blocks = [
        *(BlockDemand(f"b{n}", 1, memory_bytes=2 * GIB) for n in range(2)),
        BlockDemand("z", 1, memory_bytes=7 * GIB),
    ]
    placed = place(blocks, there, {"b0": ["w1"], "b1": ["w2"]})
    assert not placed.missing
    assert len(placed.moves) == 1
    assert "made room" in said(placed, placed.moves[0].block_id)


def test_blocks_that_shun_each_other_share_no_worker_and_no_host_where_that_can_be() -> None:
    hosts = [WorkerCapacity(f"w{n}", host=f"h{n // 2}") for n in range(4)]
    shy = BlockDemand("a", 1, anti_affinity=frozenset({"noisy"}))
    noisy = BlockDemand("b", 1, names=frozenset({"noisy"}))
    placed = place([shy, noisy], hosts, {"b": ["w0"]})
    assert placed.holders["a"][0] in ("w2", "w3")
    on_one = place([shy, noisy], hosts[:1], {"b": ["w0"]})
    assert on_one.holders == {"a": (), "b": ("w0",)}
    assert "not to be beside b, which is there" in said(on_one)
    assert place([shy, noisy], hosts[:1], {"a": ["w0"]}).holders == {"a": ("w0",), "b": ()}


def test_replicas_are_on_different_hosts_and_zones_where_that_can_be() -> None:
    there = [WorkerCapacity(f"w{n}", host=f"h{n // 2}", zone=f"z{n // 4}") for n in range(8)]
    placed = place([BlockDemand("a", 2), BlockDemand("b", 4), BlockDemand("c", 6)], there, {})
    zones = [sorted(int(worker[1:]) // 4 for worker in placed.holders[name]) for name in "abc"]
    assert zones == [[0, 1], [0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert len({int(worker[1:]) // 2 for worker in placed.holders["b"]}) == 4


def test_replicas_that_share_a_host_part_when_another_comes() -> None:
    there = [WorkerCapacity("w0", host="h0"), WorkerCapacity("w1", host="h0")]
    blocks = [BlockDemand("a", 2), BlockDemand("b", 1), BlockDemand("c", 1)]
    before = place(blocks, there, {})
    after = place(blocks, [*there, WorkerCapacity("w2", host="h1")], before.holders)
    assert "w2" in after.holders["a"]


def test_fewer_replicas_leave_the_fullest() -> None:
    blocks = [BlockDemand("a", 1), BlockDemand("b", 1)]
    placed = place(blocks, workers("w1", "w2"), {"a": ["w1", "w2"], "b": ["w1"]})
    assert placed.holders == {"a": ("w2",), "b": ("w1",)}


def test_a_heavier_worker_takes_more() -> None:
    there = [WorkerCapacity("w1"), WorkerCapacity("w2", weight=3)]
    placed = place([BlockDemand(f"b{n}", 1) for n in range(40)], there, {})
    assert held_by(placed.holders, there[1]) == 30


def test_a_heavy_block_counts_as_much_as_it_weighs() -> None:
    blocks = [BlockDemand("a", 1, weight=10), *(BlockDemand(f"b{n}", 1) for n in range(10))]
    there = workers("w1", "w2")
    placed = place(blocks, there, {})
    assert all("its load is 10, the mean is 10" in said(placed, block) for block in ("a", "b0"))


def test_a_silent_worker_keeps_what_it_has_and_is_given_nothing() -> None:
    silent = WorkerCapacity("w1", is_open=False)
    placed = place(
        [BlockDemand("a", 1), BlockDemand("b", 1), BlockDemand("c")], [silent, *workers("w2")], {"a": ["w1"]}
    )
    assert placed.holders == {"a": ("w1",), "b": ("w2",), "c": ("w2",)}
    assert "w1 not: it has not been heard of lately, so it is given nothing new." in placed.explain("b")


def test_one_that_comes_and_goes_is_asked_only_where_nobody_else_may() -> None:
    there = [WorkerCapacity("w1", is_last=True), *workers("w2")]
    blocks = [BlockDemand(f"b{n}", 1) for n in range(4)]
    placed = place(blocks, there, {})
    assert {*placed.holders.values()} == {("w2",)}
    assert place(blocks, there, placed.holders).moves == []
    assert "it comes and goes, so it is asked only where nobody else may" in said(placed, "b0")
    assert place([BlockDemand("a", 2)], there, {"a": ["w2"]}).holders == {"a": ("w1", "w2")}


def test_what_is_on_a_worker_that_leaves_goes_elsewhere_first() -> None:
    leaving = WorkerCapacity("w1", is_leaving=True)
    placed = place([BlockDemand("a", 1)], [leaving, *workers("w2")], {"a": ["w1"]})
    assert placed.holders == {"a": ("w2",)}
    assert "w2 holds it: w1 no longer does, and it was the emptiest worker that may hold it (" in said(placed)
    assert "w1 not: it is being drained." in placed.explain("a")


def test_the_last_that_holds_a_block_keeps_it_where_nobody_else_may() -> None:
    placed = place([BlockDemand("a", 1)], [WorkerCapacity("w1", is_leaving=True)], {"a": ["w1"]})
    assert placed.holders == {"a": ()}
    assert placed.missing == {"a": 1}


def test_an_explanation_names_every_worker_and_groups_those_that_are_alike() -> None:
    placed = place([BlockDemand("a", 1)], workers("w1", "w2", "w3", "w4", "w5"), {"a": ["w2"]})
    assert placed.explain("a") == [
        "a wants one replica: 1 placed.",
        "w2 holds it: it held the block before, and nothing speaks against it (its load is 1, the mean is 0.2).",
        "w1, w3, w4 and 1 more not: it could, but there are enough, and moving one would not pay "
        "(its load is 0, the mean is 0.2).",
    ]
    assert placed.explain("z") == ["z is not wanted, so no worker holds it."]


def test_an_explanation_tells_what_a_holder_has_of_what_was_asked_for() -> None:
    there = [
        WorkerCapacity("w1", cpu=8, memory_bytes=16 * GIB, gpu_memory_bytes=GIB, labels={"tier": "gold", "ssd": "x"})
    ]
    block = BlockDemand("a", 1, 2, 4 * GIB, GIB // 2, {"tier": "gold", "ssd": ""})
    assert said(place([block], there, {})).splitlines()[1] == (
        "w1 holds it: it was the emptiest worker that may hold it (it has tier=gold, ssd=x; 6 of 8 cores are left; "
        "12 of 16 GiB of memory are left; 0.5 of 1 GiB of GPU memory are left; its load is 1, the mean is 1)."
    )


# --- what always holds


def random_blocks(random: Random, count: int) -> list[BlockDemand]:
    return [
        BlockDemand(
            f"b{number}",
            replicas=random.choice((0, 1, 1, 2, 3)),
            cpu=random.choice((0, 1, 2)),
            memory_bytes=random.choice((0, 1, 4)) * GIB,
            gpu_memory_bytes=random.choice((0, 0, 0, 8)) * GIB,
            labels=random.choice(({}, {}, {}, {"tier": "gold"})),
            anti_affinity=random.choice((frozenset(), frozenset(), frozenset({f"m{number % 3}"}))),
            names=frozenset({f"m{number % 5}"}),
            weight=random.choice((1, 1, 2)),
        )
        for number in range(count)
    ]


def random_workers(random: Random, count: int) -> list[WorkerCapacity]:
    return [
        WorkerCapacity(
            f"w{number}",
            host=f"h{number // 2}",
            zone=random.choice(("", "east", "west")),
            cpu=random.choice((4, 16)),
            memory_bytes=random.choice((8, 64)) * GIB,
            gpu_memory_bytes=random.choice((0, 24)) * GIB,
            labels=random.choice(({}, {"tier": "gold"})),
            weight=random.choice((1, 1, 2)),
            is_open=random.random() < 0.9,
            is_leaving=random.random() < 0.1,
        )
        for number in range(count)
    ]


def check(blocks: list[BlockDemand], there: list[WorkerCapacity], placed: Placement, held: Held) -> None:
    demands = {block.block_id: block for block in blocks}
    for block in blocks:
        holders = placed.holders[block.block_id]
        assert len(set(holders)) == len(holders)
        assert not block.replicas or len(holders) <= block.replicas
        assert placed.missing.get(block.block_id, 0) == max(0, max(1, block.replicas) - len(holders))
    for worker in there:
        mine = [demands[block_id] for block_id, holders in placed.holders.items() if worker.worker_id in holders]
        assert sum(block.cpu for block in mine) <= worker.cpu
        assert sum(block.memory_bytes for block in mine) <= worker.memory_bytes
        assert sum(block.gpu_memory_bytes for block in mine) <= worker.gpu_memory_bytes
        assert not (worker.is_leaving and mine)
        for block in mine:
            assert worker.is_open or worker.worker_id in held.get(block.block_id, ())
            assert all(worker.labels.get(key) == value for key, value in block.labels.items())
            assert not any(
                block.anti_affinity & (other.names | {other.block_id}) for other in mine if other is not block
            )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(0, 40), st.integers(0, 9))
def test_the_rules_hold_in_any_cluster_through_any_changes(seed: int, blocks_count: int, count: int) -> None:
    random = Random(seed)
    blocks, there = random_blocks(random, blocks_count), random_workers(random, count)
    held: dict[str, tuple[str, ...]] = {}
    for _ in range(4):
        placed = place(random.sample(blocks, len(blocks)), random.sample(there, len(there)), held)
        check(blocks, there, placed, held)
        assert placed.holders == place(blocks, there, held).holders  # whatever the order
        for block in blocks:
            assert placed.explain(block.block_id)
        held = placed.holders
        for _ in range(50):
            again = place(blocks, there, held)
            if again.holders == held:
                break
            held = again.holders
        else:
            raise AssertionError("it never comes to rest")
        there = random.sample(there, random.randint(0, len(there))) + random_workers(random, random.randint(0, 2))
        there = list({worker.worker_id: worker for worker in there}.values())
        blocks = random.sample(blocks, random.randint(0, len(blocks))) + random_blocks(random, 5)
        blocks = list({block.block_id: block for block in blocks}.values())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(2, 30), st.integers(5, 20))
def test_a_loss_moves_what_was_lost_and_a_newcomer_gets_its_share(seed: int, count: int, each: int) -> None:
    random = Random(seed)
    there = workers(*(f"w{number}" for number in range(count)))
    blocks = [BlockDemand(f"b{number}", random.choice((1, min(2, count)))) for number in range(count * each)]
    placed = place(blocks, there, {})
    for _ in range(3):
        lost = random.choice(there)
        rest = [worker for worker in there if worker is not lost]
        if len(rest) < 2:
            return
        after = place(blocks, rest, placed.holders)
        assert moved(placed.holders, after.holders) <= 1.1 * held_by(placed.holders, lost)
        placed = place(blocks, there, after.holders)
        share = sum(map(len, placed.holders.values())) / len(there)
        assert moved(after.holders, placed.holders) <= 1.1 * share
        assert fullest_of(placed, there) <= 1.2


def test_the_best_worker_is_found_as_if_all_were_looked_at() -> None:
    for seed in range(30):
        random = Random(seed)
        placing = _Placing(random_blocks(random, 40), random_workers(random, 9))
        for block in random.choices(list(placing._blocks.values()), k=80):
            holders = placing._holders[block.block_id]
            may = [site for site in placing._open if site.worker_id not in holders and not site.refusal(block)]
            scores = {
                (
                    site.is_last,
                    placing._nearness(block, site),
                    site.level_with(block),
                    _order(block.block_id, site.worker_id),
                ): site
                for site in may
            }
            best = placing._best(block)
            assert best is (scores[min(scores)] if scores else None)
            if best is not None:
                placing._put(block, best, "")
