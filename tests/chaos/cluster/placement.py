"""Placement in simulation: workers of a large cluster are lost and added, and moved replicas are counted."""

import time
from collections.abc import Mapping, Sequence
from random import Random
from statistics import median

from penstock.manager.placing.placement import Placement, place_blocks
from penstock.manager.placing.sites import GIB, BlockDemand, WorkerCapacity
from tests.chaos.report import ChaosPlan, Result

BLOCKS, WORKERS, HOSTS, ZONES = 1_000, 100, 50, 5
ROUNDS = 20
SEED = 20261116
Held = Mapping[str, tuple[str, ...]]


async def run(plan: ChaosPlan) -> Result:
    random = Random(SEED)
    blocks = [make_block(number, random) for number in range(BLOCKS)]
    workers = [make_worker(number) for number in range(WORKERS)]
    first_ms, placed = place_timed(blocks, workers, {})
    lost_ratio, joined_ratio, fullest, step_ms = 0.0, 0.0, 0.0, []
    for _ in range(ROUNDS):
        held = placed.holders
        lost = random.choice(workers)
        rest = [worker for worker in workers if worker is not lost]
        spent_ms, without = place_timed(blocks, rest, held)
        step_ms.append(spent_ms)
        lost_ratio = max(lost_ratio, count_moved(held, without.holders) / max(1, count_held(held, lost)))
        spent_ms, placed = place_timed(blocks, workers, without.holders)
        step_ms.append(spent_ms)
        share = sum(map(len, placed.holders.values())) / len(workers)
        joined_ratio = max(joined_ratio, count_moved(without.holders, placed.holders) / share)
        fullest = max(fullest, find_fullest(placed, workers))
    result = Result(details={"first_ms": round(first_ms, 1), "missing": sum(placed.missing.values())})
    result.must("placement_moved", lost_ratio, high=1.1)
    result.must("placement_joined", joined_ratio, high=1.1)
    result.must("placement_fullest", fullest, high=1.2)
    result.must("placement_missing", sum(placed.missing.values()), high=0)
    result.figures["placement_ms"] = median(step_ms)
    return result


def make_block(number: int, random: Random) -> BlockDemand:
    """Return a random block: some have replicas, some need a GPU, some exclude each other."""
    return BlockDemand(
        f"blk-{number:04}",
        replicas=random.choice((1, 1, 1, 2, 3)),
        cpu=random.choice((0, 0.5, 1)),
        memory_bytes=random.choice((1, 2, 4)) * GIB,
        gpu_memory_bytes=0 if random.random() < 0.8 else GIB,
        names=frozenset({f"model-{number % 300}"}),
        anti_affinity=frozenset({f"model-{(number + 1) % 300}"}) if random.random() < 0.2 else frozenset(),
    )


def make_worker(number: int) -> WorkerCapacity:
    return WorkerCapacity(
        f"node-{number % HOSTS:02}.worker-{number // HOSTS}",
        host=f"node-{number % HOSTS:02}",
        zone=f"zone-{number % HOSTS % ZONES}",
        cpu=32,
        memory_bytes=128 * GIB,
        gpu_memory_bytes=24 * GIB if number % 2 else 0,
        labels={"tier": "gold" if number % 4 == 0 else "plain"},
    )


def place_timed(
    blocks: Sequence[BlockDemand], workers: Sequence[WorkerCapacity], held: Held
) -> tuple[float, Placement]:
    started = time.process_time()
    placed = place_blocks(blocks, workers, held)
    return (time.process_time() - started) * 1e3, placed


def count_moved(before: Held, after: Held) -> int:
    """Return the number of replicas on workers that did not hold their block before."""
    return sum(len(set(holders) - set(before.get(block_id, ()))) for block_id, holders in after.items())


def count_held(held: Held, worker: WorkerCapacity) -> int:
    return sum(worker.worker_id in holders for holders in held.values())


def find_fullest(placed: Placement, workers: Sequence[WorkerCapacity]) -> float:
    counts = [count_held(placed.holders, worker) for worker in workers]
    return max(counts) / (sum(counts) / len(counts))
