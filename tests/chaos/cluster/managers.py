"""Kill the leader or a node of etcd, or cut the leader off: requests and writes must continue under one leader."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.waiting import until_seen
from tests.chaos.cluster.bed import ClusterBed, GatewayLoad
from tests.chaos.cluster.changes import CHANGED, VersionChanges, add_changed
from tests.chaos.cluster.writes import WriteLoad
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import ECHO, add_echo

ROUNDS = 10
WRITTEN = ("written-0", "written-1", "written-2", "written-3")
ANSWERS_BETWEEN_FAULTS = 200  # requests answered by each gateway before the next fault
CUT_OFF_S = 5.0  # long enough for the lease to end on both sides
START_S = 60.0
Undo = Callable[[], Awaitable[None]]
Fault = Callable[[ClusterBed, int], Awaitable[Undo]]


async def run(plan: ChaosPlan) -> Result:
    models = plan.folder / "models"
    add_models(models)
    async with ClusterBed(models, plan.folder / "managers") as bed, GatewayLoad(bed, (ECHO, CHANGED)) as load:
        changes = VersionChanges(bed, models)
        resumed: dict[str, list[float]] = {}
        async with WriteLoad(bed, WRITTEN) as writes:
            for number in range(1 if plan.is_quick else ROUNDS):
                for name, fault in FAULTS.items():
                    await load.answered_more(ANSWERS_BETWEEN_FAULTS)
                    await writes.measure_resume_s(time.monotonic())
                    if fault is kill_leader:
                        await changes.begin()
                    took_s = await _run_round(bed, writes, number, fault)
                    if fault is kill_leader:
                        await changes.end()
                    resumed.setdefault(name, []).append(took_s)
                    plan.say(f"{name}, {number + 1}: writes after {took_s:.2f} s")
        lost = await writes.list_lost()
        result = judge(bed, resumed, lost)
    result.must("cluster_failed", load.failed(), high=0)
    result.must("cluster_changes_lost", len(changes.unfinished), high=0)
    result.details["changes"] = {"said": changes.said, "unfinished": changes.unfinished}
    problems = Counter(each.problem for each in writes.attempts if each.problem)
    result.details["load"] = load.details()
    result.details["writes"] = {
        "attempts": len(writes.attempts),
        "acknowledged": sum(bool(each.acked) for each in writes.attempts),
        "problems": dict(problems.most_common(10)),
    }
    return result


def add_models(models: Path) -> None:
    add_echo(models)
    add_changed(models)
    for name in WRITTEN:
        add_echo(models, layers=1, name=name)


async def _run_round(bed: ClusterBed, writes: WriteLoad, number: int, fault: Fault) -> float:
    since = time.monotonic()
    undo = await fault(bed, number)
    took_s = await writes.measure_resume_s(since)
    await undo()
    await bed.wait_until_complete()
    return took_s


async def kill_leader(bed: ClusterBed, number: int) -> Undo:
    host = await bed.find_leader_host()
    bed.kill_manager(host)

    async def undo() -> None:
        await asyncio.to_thread(bed.start_manager, host)

    return undo


async def kill_etcd(bed: ClusterBed, number: int) -> Undo:
    node = bed.etcd.nodes[number % len(bed.etcd.nodes)]
    node.kill()

    async def undo() -> None:
        node.start(bed.etcd.nodes)
        await until_seen(node.is_healthy, "the node of etcd is healthy", START_S)

    return undo


async def _cut_leader_off(bed: ClusterBed, number: int) -> Undo:
    host = await bed.find_leader_host()
    bed.hosts.cut_off(host)
    cut = time.monotonic()

    async def undo() -> None:
        await asyncio.sleep(max(0.0, cut + CUT_OFF_S - time.monotonic()))
        bed.hosts.heal(host)

    return undo


FAULTS = {"leader killed": kill_leader, "etcd node killed": kill_etcd, "leader cut off": _cut_leader_off}


def judge(bed: ClusterBed, resumed: dict[str, list[float]], lost: list[str]) -> Result:
    result = Result()
    took = [seconds for each in resumed.values() for seconds in each]
    terms = sorted(bed.terms(), key=lambda term: term.epoch)
    overlaps = [
        f"{before.manager} to {before.ended:.3f}, {after.manager} from {after.began:.3f}"
        for before, after in pairwise(terms)
        if after.began < before.ended or after.epoch == before.epoch
    ]
    heard = bed.list_accepted_terms()
    back = [name for name, epochs in heard.items() if epochs != sorted(epochs)]
    result.must("cluster_writes_lost", len(lost), high=0)
    result.must("cluster_writes_resume_s", median(took), high=3)
    result.must("cluster_writes_resume_worst_s", max(took), high=6)
    result.must("cluster_two_leaders", len(overlaps) + len(back), high=0)
    result.must("cluster_terms", len(terms), low=1 + len(resumed["leader killed"]) + len(resumed["leader cut off"]))
    result.details = {
        "resumed_s": {name: [round(seconds, 2) for seconds in each] for name, each in resumed.items()},
        "lost": lost[:20],
        "overlaps": overlaps,
        "went_back": back,
        "epochs_heard": {name: len(set(epochs)) for name, epochs in heard.items()},
    }
    return result
