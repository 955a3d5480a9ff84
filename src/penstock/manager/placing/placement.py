"""The placement of blocks on workers. Pure: no I/O.

`place_blocks` keeps blocks on the workers that hold them, if they may stay, and places missing replicas on the emptiest
worker that may hold them. To balance the load, it moves no more replicas than new workers should hold. It returns only
the target; `BlockTable.find_assigned_workers` keeps a block on workers that serve it until its targets serve it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple
from zlib import crc32

from penstock.manager.placing.sites import BlockDemand, FreeCapacity, Site, WorkerCapacity

# Load levels as a share of the mean.
HIGH = 1.2  # workers above this level give blocks away
LOW = 0.9  # workers below this level receive blocks
FULL = 1.1  # a worker that receives blocks is filled up to this level
LOST_SHARE = 0.1  # if replicas were lost, this share of their number may move in the same step to balance the load
EVERYWHERE = "the block is wanted on every worker that may hold it"
KEPT = "it held the block before and may keep it"


Nearness = tuple[int, int, int]


class Move(NamedTuple):
    block_id: str
    source: str
    target: str


@dataclass(slots=True)
class Placement:
    holders: dict[str, tuple[str, ...]]  # by block, the workers that should hold it
    missing: dict[str, int]  # replicas without a worker, by block
    moves: list[Move]  # moves that balance the load, of blocks that could have stayed
    _blocks: Mapping[str, BlockDemand]
    _sites: Mapping[str, Site]
    _reasons: Mapping[tuple[str, str], str]

    def explain(self, block_id: str) -> list[str]:
        """Return sentences that explain why each worker holds the block or does not."""
        demand = self._blocks.get(block_id)
        if demand is None:
            return [f"{block_id} is not wanted, so no worker holds it."]
        holders = self.holders[block_id]
        mean = _compute_mean_level(self._sites.values())
        found = [_format_heading(demand, len(holders), self.missing.get(block_id, 0))]
        for worker in holders:
            site = self._sites[worker]
            merits = "; ".join([*site.list_merits(demand), f"its load is {site.level:.3g}, the mean is {mean:.3g}"])
            found.append(f"{worker} holds it: {self._reasons.get((block_id, worker), EVERYWHERE)} ({merits}).")
        without: dict[str, list[str]] = {}
        for site in self._sites.values():
            if site.worker_id not in holders:
                without.setdefault(self._explain_refusal(demand, site, mean), []).append(site.worker_id)
        return found + [f"Not on {_join_names(workers)}: {why}." for why, workers in without.items()]

    def _explain_refusal(self, demand: BlockDemand, site: Site, mean: float) -> str:
        if refusal := site.explain_refusal(demand):
            return refusal
        level = f"its load is {site.level:.3g}, the mean is {mean:.3g}"
        if site.is_last_resort:
            return f"it is flapping, so it gets only blocks that no other worker can hold ({level})"
        if demand.replicas and len(self.holders[demand.block_id]) >= demand.replicas:
            return f"it could, but there are enough replicas, and moving one would not balance the load ({level})"
        return f"it could, but the block has not been assigned to it yet ({level})"


def place_blocks(
    blocks: Iterable[BlockDemand], workers: Iterable[WorkerCapacity], held_by_block: Mapping[str, Collection[str]]
) -> Placement:
    """Return a placement of the blocks on the workers.

    `held_by_block` contains, by block, the workers that the previous placement chose, or the workers that hold the
    block. If it is the result of an earlier call with the same blocks and workers, the placement stays the same.
    """
    placing = _PlacementBuilder(blocks, workers)
    budget = placing.keep_held_blocks(held_by_block)
    placing.place_missing_replicas()
    placing.place_everywhere()
    placing.balance_load(budget)
    placing.spread_replicas(budget)
    return placing.make_placement()


class _PlacementBuilder:
    """Computes a placement of blocks on sites (workers and their free capacity), both in the order of their ids."""

    def __init__(self, blocks: Iterable[BlockDemand], workers: Iterable[WorkerCapacity]) -> None:
        self._blocks = {block.block_id: block for block in sorted(blocks, key=lambda block: block.block_id)}
        shared: dict[str, FreeCapacity] = {}
        self._sites = {each.worker_id: Site(each, shared) for each in sorted(workers, key=lambda each: each.worker_id)}
        self._machines: dict[str, list[Site]] = {}
        for site in self._sites.values():
            self._machines.setdefault(site.machine, []).append(site)
        self._has_anti_affinity = any(block.anti_affinity for block in self._blocks.values())
        self._open = [site for site in self._sites.values() if site.is_open]
        self._zones = {site.zone for site in self._open}
        self._holders: dict[str, dict[str, Site]] = {block_id: {} for block_id in self._blocks}
        self._reasons: dict[tuple[str, str], str] = {}
        self._moves: list[Move] = []
        self._stuck: set[str] = set()  # blocks that fit on no other site until some block is removed from a site
        self._lost_from: dict[str, list[str]] = {}  # by block, the workers that no longer hold it

    def make_placement(self) -> Placement:
        holders = {block_id: tuple(sorted(sites)) for block_id, sites in self._holders.items()}
        missing = {
            block_id: short
            for block_id, block in self._blocks.items()
            if (short := max(1, block.replicas) - len(holders[block_id])) > 0
        }
        return Placement(holders, missing, self._moves, self._blocks, self._sites, self._reasons)

    # --- keeping held blocks

    def keep_held_blocks(self, held_by_block: Mapping[str, Collection[str]]) -> float:
        """Keep blocks on the sites that hold them, if allowed; return how many blocks may move to balance the load."""
        surplus: list[BlockDemand] = []
        needed: list[BlockDemand] = []
        for block_id, block in self._blocks.items():
            has_many = 0 < block.replicas < len(held_by_block.get(block_id, ()))
            (surplus if has_many else needed).append(block)
        for block in (*needed, *surplus):  # surplus replicas must not take capacity from needed replicas
            for worker in sorted(held_by_block.get(block.block_id, ())):
                site = self._sites.get(worker)
                if site is not None and not site.explain_refusal(block, is_held=True):
                    self._add(block, site, KEPT)
                else:
                    self._lost_from.setdefault(block.block_id, []).append(worker)
        for block in surplus:
            self._remove_surplus(block)
        lost = sum(
            min(len(gone), max(0, self._blocks[block_id].replicas - len(self._holders[block_id])))
            for block_id, gone in self._lost_from.items()
        )
        return int(LOST_SHARE * lost) if lost else self._count_replicas_for_new_workers()

    def _count_replicas_for_new_workers(self) -> float:
        """Return how many replicas should move to the workers that hold no blocks yet."""
        new = sum(site.weight for site in self._open if not site.blocks)
        replicas = sum(len(self._holders[block_id]) for block_id, block in self._blocks.items() if block.replicas)
        if not new or not replicas:
            return inf
        return max(1, int(FULL * replicas * new / sum(site.weight for site in self._open)))

    def _remove_surplus(self, block: BlockDemand) -> None:
        """Remove surplus replicas: first replicas that share a zone or machine, then replicas on full sites."""
        holders = self._holders[block.block_id]
        while len(holders) > block.replicas:
            self._remove(
                block, max(holders.values(), key=lambda site: (self._compute_nearness(block, site), site.level))
            )

    # --- placing missing replicas

    def place_missing_replicas(self) -> None:
        """Place missing replicas; the blocks that are hardest to place come first."""
        short = [block for block in self._blocks.values() if len(self._holders[block.block_id]) < block.replicas]
        for block in sorted(short, key=_compute_placing_order):
            while len(self._holders[block.block_id]) < block.replicas:
                site = self._find_best_site(block) or self._make_room(block)
                if site is None:
                    break
                self._add(block, site, self._explain_choice(block, site))

    def place_everywhere(self) -> None:
        """Place each block without a set number of replicas on every site that may hold the block.

        Blocks without any constraint are counted together, which is much faster.
        """
        excluded = frozenset().union(*(block.anti_affinity for block in self._blocks.values()))
        everywhere, weight = {site.worker_id: site for site in self._open}, 0.0
        for block in self._blocks.values():
            if block.replicas:
                continue
            is_excluded = not excluded.isdisjoint((*block.names, block.block_id))
            if block.is_unconstrained and not is_excluded and not self._holders[block.block_id]:
                self._holders[block.block_id] = everywhere
                weight += block.weight
                continue
            for site in self._open:
                if site.worker_id not in self._holders[block.block_id] and not site.explain_refusal(block):
                    self._add(block, site, EVERYWHERE)
        for site in self._open:
            site.add_load(weight)

    def _find_best_site(self, block: BlockDemand, without: Site | None = None) -> Site | None:
        """Return the allowed site that shares least with sites of the block's replicas; if equal, the emptiest."""
        holders = self._holders[block.block_id]
        others = [site for site in holders.values() if site is not without]
        best, best_score = None, (True, (inf, inf, inf))
        least = False, (_count_fewest_replicas(self._zones, [site.zone for site in others]), 0, 0)
        levels = [(site.load + block.weight) / site.weight for site in self._open]
        seed = crc32(f"{block.block_id}/".encode())
        for level in sorted(set(levels)):
            tied = [site for site, its_level in zip(self._open, levels, strict=True) if its_level == level]
            for site in sorted(tied, key=lambda site: crc32(site.key, seed)):  # a different order for each block
                if site.worker_id in holders or site.explain_refusal(block):
                    continue
                score = site.is_last_resort, self._compute_nearness(block, site, without)
                if best is None or score < best_score:
                    best, best_score = site, score
                if best_score == least:
                    return best  # all later sites are fuller, and none is further away
        return best

    def _compute_nearness(self, block: BlockDemand, site: Site, without: Site | None = None) -> Nearness:
        """Return how many replicas share the site's zone, how many share its machine, and the number of conflicts.

        A conflict is a worker on the site's machine that holds a block which anti-affinity keeps away from this block.
        """
        zone = machine = near = 0
        for other in self._holders[block.block_id].values():
            if other is not site and other is not without:
                zone += other.zone == site.zone
                machine += other.machine == site.machine
        if self._has_anti_affinity and len(self._machines[site.machine]) > 1:
            near = sum(other is not site and other.conflicts_with(block) for other in self._machines[site.machine])
        return zone, machine, near

    def _explain_choice(self, block: BlockDemand, site: Site) -> str:
        others = sorted(self._holders[block.block_id])
        lost = self._lost_from.get(block.block_id)
        why = f"{lost.pop(0)} no longer holds it, and " if lost else ""
        where = ""
        if others and block.replicas > 1:
            is_apart = not any(self._compute_nearness(block, site)[:2])
            where = f" away from {_join_names(others)}" if is_apart else " that does not hold it yet"
        return f"{why}it was the emptiest worker{where} that may hold it"

    def _make_room(self, block: BlockDemand) -> Site | None:
        """Move another block away from a site so that this block fits there; return the site."""
        for site in sorted(self._open, key=lambda site: (self._compute_nearness(block, site), site.level)):
            if site.worker_id in self._holders[block.block_id]:
                continue
            for other in [self._blocks[each] for each in site.blocks]:
                if not other.replicas or other.block_id in self._stuck or not site.fits_without(block, other):
                    continue
                target = self._find_best_site(other)
                if target is None:
                    self._stuck.add(other.block_id)
                else:
                    self._move(other, site, target, f"it was moved here to free {site.worker_id} for {block.block_id}")
                    return site
        return None

    # --- balancing the load

    def balance_load(self, max_moves: float) -> None:
        exhausted: set[tuple[str, str]] = set()  # pairs of sites between which no block can move
        mean = _compute_mean_level(self._sites.values())
        while len(self._moves) < max_moves and (move := self._find_next_move(mean, exhausted)) is not None:
            block, donor, receiver = move
            self._move(block, donor, receiver, f"it was emptier than {donor.worker_id}, which held it before")

    def _find_next_move(self, mean: float, exhausted: set[tuple[str, str]]) -> tuple[BlockDemand, Site, Site] | None:
        by_level = sorted(self._open, key=lambda site: (site.level, site.worker_id))
        for receiver in by_level:
            if receiver.level >= mean:
                return None
            if receiver.is_last_resort:
                continue
            is_low = receiver.level < LOW * mean
            for donor in reversed(by_level):
                if donor.level <= receiver.level or not (is_low or donor.level > HIGH * mean):
                    break
                if (donor.worker_id, receiver.worker_id) in exhausted:
                    continue
                most = inf if donor.level > HIGH * mean else FULL * mean
                block = self._find_movable_block(donor, receiver, most)
                if block is not None:
                    return block, donor, receiver
                exhausted.add((donor.worker_id, receiver.worker_id))
        return None

    def _find_movable_block(self, source: Site, target: Site, max_weight: float) -> BlockDemand | None:
        """Return the block whose move separates its replicas most; of several such blocks, the heaviest."""
        best: tuple[Nearness, float, int] | None = None
        found = None
        for block_id in source.blocks:
            block = self._blocks[block_id]
            level = target.compute_level_with(block)
            if not block.replicas or not block.weight or target.worker_id in self._holders[block_id]:
                continue
            if level >= source.level or level > max_weight or target.explain_refusal(block):
                continue
            gain = self._compute_gain(block, source, target)
            score = gain, block.weight, -_compute_tie_order(block_id, target.worker_id)
            if gain >= (0, 0, 0) and (best is None or score > best):
                best, found = score, block
        return found

    def _compute_gain(self, block: BlockDemand, source: Site, target: Site) -> Nearness:
        before = self._compute_nearness(block, source)
        after = self._compute_nearness(block, target, without=source)
        return before[0] - after[0], before[1] - after[1], before[2] - after[2]

    def spread_replicas(self, max_moves: float) -> None:
        """Move replicas that share a machine or a zone to other sites with capacity."""
        most = FULL * _compute_mean_level(self._sites.values())
        for block in self._blocks.values():
            holders = self._holders[block.block_id]
            if block.replicas < 2 or len(self._moves) >= max_moves:
                continue
            donor = max(
                holders.values(), key=lambda site: (self._compute_nearness(block, site), site.level), default=None
            )
            if donor is None or not donor.is_open or not any(self._compute_nearness(block, donor)[:2]):
                continue
            receiver = self._find_best_site(block, without=donor)
            if receiver is None or receiver.is_last_resort or receiver.compute_level_with(block) > most:
                continue
            if self._compute_gain(block, donor, receiver) > (0, 0, 0):
                self._move(block, donor, receiver, f"{donor.worker_id}, which held it before, is near another replica")

    # --- helpers

    def _move(self, block: BlockDemand, source: Site, target: Site, reason: str) -> None:
        self._remove(block, source)
        self._add(block, target, reason)
        self._moves.append(Move(block.block_id, source.worker_id, target.worker_id))

    def _add(self, block: BlockDemand, site: Site, reason: str) -> None:
        site.add_block(block)
        self._holders[block.block_id][site.worker_id] = site
        self._reasons[block.block_id, site.worker_id] = reason

    def _remove(self, block: BlockDemand, site: Site) -> None:
        self._stuck.clear()
        site.remove_block(block)
        del self._holders[block.block_id][site.worker_id]


def _compute_mean_level(sites: Iterable[Site]) -> float:
    present = [site for site in sites if not site.is_leaving]
    weight = sum(site.weight for site in present)
    return sum(site.level * site.weight for site in present) / weight if weight else 0.0


def _compute_placing_order(block: BlockDemand) -> tuple[float, float, float, int, float, str]:
    """Return the key that sorts blocks for placing: large blocks and blocks with many constraints come first."""
    constraints = len(block.labels) + len(block.anti_affinity)
    return -block.gpu_memory_bytes, -block.memory_bytes, -block.cpu, -constraints, -block.weight, block.block_id


def _compute_tie_order(block_id: str, worker_id: str) -> int:
    """Return the key that sorts equally good workers; the order differs from block to block."""
    return crc32(f"{block_id}/{worker_id}".encode())


def _count_fewest_replicas(zones: Collection[str], replica_zones: Sequence[str]) -> int:
    """Return the number of replicas in the zone with the fewest replicas."""
    return min(map(replica_zones.count, zones), default=0)


def _format_heading(block: BlockDemand, holders: int, missing: int) -> str:
    wanted = f"{block.replicas} replicas" if block.replicas > 1 else "one replica" if block.replicas else "a replica"
    where = "" if block.replicas else " on every worker that may hold one"
    short = f", {missing} without a worker" if missing else ""
    return f"{block.block_id} wants {wanted}{where}: {holders} placed{short}."


def _join_names(workers: list[str], max_names: int = 3) -> str:
    if len(workers) <= max_names:
        return ", ".join(workers[:-1]) + " and " * (len(workers) > 1) + workers[-1]
    return f"{', '.join(workers[:max_names])} and {len(workers) - max_names} more"
