"""Which workers hold which blocks. Decides; never acts.

`place` keeps what is held where it may stay, gives what is missing to the emptiest that may have it, and moves no more
than a newcomer's share. It names the target alone: nothing is lost on the way as long as whoever acts on it assigns
`Registry.assigned_to`, in which those who serve a block stay until its target does.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple
from zlib import crc32

from penstock.manager.placing.sites import BlockDemand, Site, SiteRoom, WorkerCapacity

HIGH = 1.2  # of the mean: who has more gives
LOW = 0.9  # of the mean: who has less is given
FULL = 1.1  # of the mean: what is given to one who has too little does not lead beyond
LOST_SHARE = 0.1  # of what was lost: so much else may move in the same step
EVERYWHERE = "it is wanted on every worker that may hold it"
KEPT = "it held the block before, and nothing speaks against it"


Nearness = tuple[int, int, int]


class Move(NamedTuple):
    block_id: str
    source: str
    target: str


@dataclass(slots=True)
class Placement:
    holders: dict[str, tuple[str, ...]]  # by block, the workers that should hold it
    missing: dict[str, int]  # replicas that find no worker
    moves: list[Move]  # of what could have stayed, to even out
    _blocks: Mapping[str, BlockDemand]
    _sites: Mapping[str, Site]
    _reasons: Mapping[tuple[str, str], str]

    def explain(self, block_id: str) -> list[str]:
        """Plain sentences: where the block is and why, and why not elsewhere."""
        demand = self._blocks.get(block_id)
        if demand is None:
            return [f"{block_id} is not wanted, so no worker holds it."]
        holders = self.holders[block_id]
        mean = _mean(self._sites.values())
        found = [_heading(demand, len(holders), self.missing.get(block_id, 0))]
        for worker in holders:
            site = self._sites[worker]
            merits = "; ".join([*site.merits(demand), f"its load is {site.level:.3g}, the mean is {mean:.3g}"])
            found.append(f"{worker} holds it: {self._reasons.get((block_id, worker), EVERYWHERE)} ({merits}).")
        without: dict[str, list[str]] = {}
        for site in self._sites.values():
            if site.worker_id not in holders:
                without.setdefault(self._refusal(demand, site, mean), []).append(site.worker_id)
        return found + [f"{_listed(workers)} not: {why}." for why, workers in without.items()]

    def _refusal(self, demand: BlockDemand, site: Site, mean: float) -> str:
        if refusal := site.refusal(demand):
            return refusal
        level = f"its load is {site.level:.3g}, the mean is {mean:.3g}"
        if site.is_last:
            return f"it comes and goes, so it is asked only where nobody else may ({level})"
        if demand.replicas and len(self.holders[demand.block_id]) >= demand.replicas:
            return f"it could, but there are enough, and moving one would not pay ({level})"
        return f"it could, but has not been asked yet ({level})"


def place(
    blocks: Iterable[BlockDemand], workers: Iterable[WorkerCapacity], held: Mapping[str, Collection[str]]
) -> Placement:
    """`held`: by block, the workers that were to hold it, or do where nobody remembers. The same asked again,
    with what it answered as held, moves nothing."""
    placing = _Placing(blocks, workers)
    budget = placing.keep(held)
    placing.fill()
    placing.fill_everywhere()
    placing.even_out(budget)
    placing.spread(budget)
    return placing.result()


class _Placing:
    """One decision on its way; blocks and sites are looked at in the order of their ids."""

    def __init__(self, blocks: Iterable[BlockDemand], workers: Iterable[WorkerCapacity]) -> None:
        self._blocks = {block.block_id: block for block in sorted(blocks, key=lambda block: block.block_id)}
        shared: dict[str, SiteRoom] = {}
        self._sites = {each.worker_id: Site(each, shared) for each in sorted(workers, key=lambda each: each.worker_id)}
        self._machines: dict[str, list[Site]] = {}
        for site in self._sites.values():
            self._machines.setdefault(site.machine, []).append(site)
        self._has_enemies = any(block.anti_affinity for block in self._blocks.values())
        self._open = [site for site in self._sites.values() if site.is_open]
        self._zones = {site.zone for site in self._open}
        self._holders: dict[str, dict[str, Site]] = {block_id: {} for block_id in self._blocks}
        self._reasons: dict[tuple[str, str], str] = {}
        self._moves: list[Move] = []
        self._stuck: set[str] = set()  # blocks that fit nowhere else, as long as nothing is taken from anywhere
        self._lost_from: dict[str, list[str]] = {}  # by block, who no longer holds it

    def result(self) -> Placement:
        holders = {block_id: tuple(sorted(sites)) for block_id, sites in self._holders.items()}
        missing = {
            block_id: short
            for block_id, block in self._blocks.items()
            if (short := max(1, block.replicas) - len(holders[block_id])) > 0
        }
        return Placement(holders, missing, self._moves, self._blocks, self._sites, self._reasons)

    # --- what is there stays

    def keep(self, held: Mapping[str, Collection[str]]) -> float:
        """Returns how many blocks may move beside those that must."""
        surplus: list[BlockDemand] = []
        needed: list[BlockDemand] = []
        for block_id, block in self._blocks.items():
            has_many = 0 < block.replicas < len(held.get(block_id, ()))
            (surplus if has_many else needed).append(block)
        for block in (*needed, *surplus):  # what is too many takes no room from others
            for worker in sorted(held.get(block.block_id, ())):
                site = self._sites.get(worker)
                if site is not None and not site.refusal(block, is_held=True):
                    self._put(block, site, KEPT)
                else:
                    self._lost_from.setdefault(block.block_id, []).append(worker)
        for block in surplus:
            self._trim(block)
        lost = sum(
            min(len(gone), max(0, self._blocks[block_id].replicas - len(self._holders[block_id])))
            for block_id, gone in self._lost_from.items()
        )
        return int(LOST_SHARE * lost) if lost else self._newcomers_share()

    def _newcomers_share(self) -> float:
        new = sum(site.weight for site in self._open if not site.blocks)
        replicas = sum(len(self._holders[block_id]) for block_id, block in self._blocks.items() if block.replicas)
        if not new or not replicas:
            return inf
        return max(1, int(FULL * replicas * new / sum(site.weight for site in self._open)))

    def _trim(self, block: BlockDemand) -> None:
        """Those go first that share a host or a zone with another, then those on the fullest."""
        holders = self._holders[block.block_id]
        while len(holders) > block.replicas:
            self._take(block, max(holders.values(), key=lambda site: (self._nearness(block, site), site.level)))

    # --- what is missing is given

    def fill(self) -> None:
        """What is hardest to place comes first."""
        short = [block for block in self._blocks.values() if len(self._holders[block.block_id]) < block.replicas]
        for block in sorted(short, key=_difficulty):
            while len(self._holders[block.block_id]) < block.replicas:
                site = self._best(block) or self._make_room(block)
                if site is None:
                    break
                self._put(block, site, self._reason(block, site))

    def fill_everywhere(self) -> None:
        """What asks for nothing, and nobody shuns, is all counted at once."""
        shunned = frozenset().union(*(block.anti_affinity for block in self._blocks.values()))
        everywhere, weight = {site.worker_id: site for site in self._open}, 0.0
        for block in self._blocks.values():
            if block.replicas:
                continue
            is_unshunned = shunned.isdisjoint((*block.names, block.block_id))
            if block.is_plain and is_unshunned and not self._holders[block.block_id]:
                self._holders[block.block_id] = everywhere
                weight += block.weight
                continue
            for site in self._open:
                if site.worker_id not in self._holders[block.block_id] and not site.refusal(block):
                    self._put(block, site, EVERYWHERE)
        for site in self._open:
            site.carry(weight)

    def _best(self, block: BlockDemand, without: Site | None = None) -> Site | None:
        """Of those that may have it, the emptiest of those furthest from its other replicas."""
        holders = self._holders[block.block_id]
        others = [site for site in holders.values() if site is not without]
        best, best_score = None, (True, (inf, inf, inf))
        least = False, (_least(self._zones, [site.zone for site in others]), 0, 0)
        levels = [(site.load + block.weight) / site.weight for site in self._open]
        seed = crc32(f"{block.block_id}/".encode())
        for level in sorted(set(levels)):
            tied = [site for site, its_level in zip(self._open, levels, strict=True) if its_level == level]
            for site in sorted(tied, key=lambda site: crc32(site.key, seed)):  # another order for each block
                if site.worker_id in holders or site.refusal(block):
                    continue
                score = site.is_last, self._nearness(block, site, without)
                if best is None or score < best_score:
                    best, best_score = site, score
                if best_score == least:
                    return best  # all that follow are fuller, and none is further away
        return best

    def _nearness(self, block: BlockDemand, site: Site, without: Site | None = None) -> Nearness:
        """How many other replicas share its zone and its machine, and how many there it wants to be away from."""
        zone = machine = near = 0
        for other in self._holders[block.block_id].values():
            if other is not site and other is not without:
                zone += other.zone == site.zone
                machine += other.machine == site.machine
        if self._has_enemies and len(self._machines[site.machine]) > 1:
            near = sum(other is not site and other.is_shunned(block) for other in self._machines[site.machine])
        return zone, machine, near

    def _reason(self, block: BlockDemand, site: Site) -> str:
        others = sorted(self._holders[block.block_id])
        lost = self._lost_from.get(block.block_id)
        why = f"{lost.pop(0)} no longer does, and " if lost else ""
        where = ""
        if others and block.replicas > 1:
            is_apart = not any(self._nearness(block, site)[:2])
            where = f" away from {_listed(others)}" if is_apart else " that does not hold it yet"
        return f"{why}it was the emptiest worker{where} that may hold it"

    def _make_room(self, block: BlockDemand) -> Site | None:
        """One block goes elsewhere, so that this one fits."""
        for site in sorted(self._open, key=lambda site: (self._nearness(block, site), site.level)):
            if site.worker_id in self._holders[block.block_id]:
                continue
            for other in [self._blocks[each] for each in site.blocks]:
                if not other.replicas or other.block_id in self._stuck or not site.fits_without(block, other):
                    continue
                target = self._best(other)
                if target is None:
                    self._stuck.add(other.block_id)
                else:
                    self._move(other, site, target, f"it made room on {site.worker_id} for {block.block_id}")
                    return site
        return None

    # --- nobody has much more than the others

    def even_out(self, budget: float) -> None:
        dead: set[tuple[str, str]] = set()  # pairs between which nothing can go
        mean = _mean(self._sites.values())
        while len(self._moves) < budget and (move := self._next_move(mean, dead)) is not None:
            block, donor, receiver = move
            self._move(block, donor, receiver, f"it was emptier than {donor.worker_id}, which had it")

    def _next_move(self, mean: float, dead: set[tuple[str, str]]) -> tuple[BlockDemand, Site, Site] | None:
        by_level = sorted(self._open, key=lambda site: (site.level, site.worker_id))
        for receiver in by_level:
            if receiver.level >= mean:
                break
            if receiver.is_last:
                continue
            is_poor = receiver.level < LOW * mean
            for donor in reversed(by_level):
                if donor.level <= receiver.level or not (is_poor or donor.level > HIGH * mean):
                    break
                if (donor.worker_id, receiver.worker_id) in dead:
                    continue
                most = inf if donor.level > HIGH * mean else FULL * mean
                block = self._movable(donor, receiver, most)
                if block is not None:
                    return block, donor, receiver
                dead.add((donor.worker_id, receiver.worker_id))
        return None

    def _movable(self, donor: Site, receiver: Site, most: float) -> BlockDemand | None:
        """What brings replicas further apart goes first, then what is heavy: fewer go."""
        best: tuple[Nearness, float, int] | None = None
        found = None
        for block_id in donor.blocks:
            block = self._blocks[block_id]
            level = receiver.level_with(block)
            if not block.replicas or not block.weight or receiver.worker_id in self._holders[block_id]:
                continue
            if level >= donor.level or level > most or receiver.refusal(block):
                continue
            gain = self._gain(block, donor, receiver)
            score = gain, block.weight, -_order(block_id, receiver.worker_id)
            if gain >= (0, 0, 0) and (best is None or score > best):
                best, found = score, block
        return found

    def _gain(self, block: BlockDemand, donor: Site, receiver: Site) -> Nearness:
        before = self._nearness(block, donor)
        after = self._nearness(block, receiver, without=donor)
        return before[0] - after[0], before[1] - after[1], before[2] - after[2]

    def spread(self, budget: float) -> None:
        """Replicas that share a host or a zone part where another worker has room below the mean."""
        most = FULL * _mean(self._sites.values())
        for block in self._blocks.values():
            holders = self._holders[block.block_id]
            if block.replicas < 2 or len(self._moves) >= budget:
                continue
            donor = max(holders.values(), key=lambda site: (self._nearness(block, site), site.level), default=None)
            if donor is None or not donor.is_open or not any(self._nearness(block, donor)[:2]):
                continue
            receiver = self._best(block, without=donor)
            if receiver is None or receiver.is_last or receiver.level_with(block) > most:
                continue
            if self._gain(block, donor, receiver) > (0, 0, 0):
                self._move(block, donor, receiver, f"{donor.worker_id} had it too near to another replica")

    # --- what the above is made of

    def _move(self, block: BlockDemand, donor: Site, receiver: Site, why: str) -> None:
        self._take(block, donor)
        self._put(block, receiver, why)
        self._moves.append(Move(block.block_id, donor.worker_id, receiver.worker_id))

    def _put(self, block: BlockDemand, site: Site, why: str) -> None:
        site.put(block)
        self._holders[block.block_id][site.worker_id] = site
        self._reasons[block.block_id, site.worker_id] = why

    def _take(self, block: BlockDemand, site: Site) -> None:
        self._stuck.clear()
        site.take(block)
        del self._holders[block.block_id][site.worker_id]


def _mean(sites: Iterable[Site]) -> float:
    present = [site for site in sites if not site.is_leaving]
    weight = sum(site.weight for site in present)
    return sum(site.level * site.weight for site in present) / weight if weight else 0.0


def _difficulty(block: BlockDemand) -> tuple[float, float, float, int, float, str]:
    """The order in which blocks are placed: large and choosy ones first."""
    picky = len(block.labels) + len(block.anti_affinity)
    return -block.gpu_memory_bytes, -block.memory_bytes, -block.cpu, -picky, -block.weight, block.block_id


def _order(block_id: str, worker_id: str) -> int:
    """Between workers that are alike: another one for each block."""
    return crc32(f"{block_id}/{worker_id}".encode())


def _least(places: Collection[str], taken: Sequence[str]) -> int:
    """How often the place is taken that is taken least."""
    return min(map(taken.count, places), default=0) if taken else 0


def _heading(block: BlockDemand, holders: int, missing: int) -> str:
    wanted = f"{block.replicas} replicas" if block.replicas > 1 else "one replica" if block.replicas else "a replica"
    where = "" if block.replicas else " on every worker that may hold it"
    short = f", {missing} find no worker" if missing else ""
    return f"{block.block_id} wants {wanted}{where}: {holders} placed{short}."


def _listed(workers: list[str], most: int = 3) -> str:
    if len(workers) <= most:
        return ", ".join(workers[:-1]) + " and " * (len(workers) > 1) + workers[-1]
    return f"{', '.join(workers[:most])} and {len(workers) - most} more"
