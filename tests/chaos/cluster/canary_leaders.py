"""Kill the leader and a node of etcd during rollouts: a good version must advance, and bad ones be rolled back."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.waiting import until
from penstock.client.cluster import ClusterClient
from penstock.features.rollouts.rollout_plan import RolloutRecord
from penstock.pb.v1 import cluster_pb2
from tests.chaos.cluster.bed import GATEWAY_HOSTS, MANAGER_HOSTS, ClusterBed
from tests.chaos.cluster.canary import DEADLINE_S, MODEL, CanaryAnswers, add_version, ask_forever
from tests.chaos.cluster.managers import Fault, kill_etcd, kill_leader
from tests.chaos.report import ChaosPlan, Result

RATE = 40.0  # on each gateway
PLAN = {"name": MODEL, "steps": [20, 60, 100], "hold_s": 3, "min_answers": 30, "keep_s": 0}
MAX_ROLLOUT_S, WARM_UP_S = 90.0, 3.0
ROLLOUTS = "rollouts/"
CANARY_ERROR = "trained on something else"  # error message of a failing version
GOOD, FAILS, SLOW = "2", "3", "4"  # versions
MAX_CANARY_REQUESTS = 150  # a new leader without its predecessor's counts begins again


async def run(plan: ChaosPlan) -> Result:
    models = plan.folder / "canary-leaders-models"
    add_version(models, 1, "old")
    async with ClusterBed(models, plan.folder / "canary-leaders") as bed, _send_requests(bed) as heard:
        await asyncio.sleep(WARM_UP_S)
        watched = WatchedRollouts(bed, models, heard)
        good = await watched.roll_out(GOOD, "old", {0: kill_leader, 1: kill_etcd})
        fails = await watched.roll_out(FAILS, "fails", {0: kill_leader})
        slow = await watched.roll_out(SLOW, "slow", {0: kill_leader})
        for record in (good, fails, slow):
            plan.say(f"to version {record.new}: {record.phase} {record.reason}")
        terms = len(list(bed.terms()))
    result = Result()
    ours = {said: count for said, count in heard.failures.items() if CANARY_ERROR not in said}
    result.must("canary_leaders_failed", sum(ours.values()), high=0)
    result.must("canary_leaders_done", float(good.phase == "done"), low=1)
    result.must("canary_leaders_rolled_back", sum(each.phase == "rolled back" for each in (fails, slow)), low=2)
    result.must("canary_leaders_steps_back", watched.steps_back, high=0)
    result.must("canary_leaders_counted_twice", max(0, good.answers - heard.answers[GOOD]), high=0)
    result.must(
        "canary_leaders_answers",
        max(watched.count_requests(FAILS), watched.count_requests(SLOW)),
        high=MAX_CANARY_REQUESTS,
    )
    result.must("canary_leaders_terms", terms, low=4)
    result.details = {"answers": dict(heard.answers), "failures": ours, "records": watched.seen}
    return result


@asynccontextmanager
async def _send_requests(bed: ClusterBed) -> AsyncIterator[CanaryAnswers]:
    """Send requests to both gateways during the `with` block."""
    heard = CanaryAnswers()
    targets = [f"{bed.hosts.address(host)}:50051" for host in GATEWAY_HOSTS]
    asking = [asyncio.create_task(ask_forever(target, RATE, heard)) for target in targets]
    try:
        yield heard
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@dataclass
class WatchedRollouts:
    """Runs rollouts one after another, and collects every stored record of them."""

    bed: ClusterBed
    models: Path
    heard: CanaryAnswers
    seen: list[str] = field(default_factory=list)
    steps_back: int = 0

    def count_requests(self, version: str) -> int:
        """Return the number of requests that a version answered, with success or failure."""
        failed = sum(count for said, count in self.heard.failures.items() if CANARY_ERROR in said)
        return self.heard.answers[version] + (failed if version == FAILS else 0)

    async def roll_out(self, version: str, behaviour: str, faults: Mapping[int, Fault]) -> RolloutRecord:
        """Start a rollout, and cause each fault in its step, once the version has answered. Return the last record."""
        add_version(self.models, int(version), behaviour)
        records: list[RolloutRecord] = []
        watching = asyncio.create_task(self._watch(records, (await self.bed.store.list(ROLLOUTS)).revision))
        try:
            await asyncio.to_thread(self._start, {**PLAN, "new": version})
            for step, fault in faults.items():
                await until(lambda at=step: records and self._is_at(records[-1], at), f"step {step}", MAX_ROLLOUT_S)  # type: ignore[misc]
                before = self.count_requests(version)
                await until(lambda was=before: self.count_requests(version) > was, "it has answered", MAX_ROLLOUT_S)  # type: ignore[misc]
                undo = await fault(self.bed, step)
                await undo()
            await until(lambda: records[-1].is_over, "the rollout is over", MAX_ROLLOUT_S)
            await self.bed.wait_until_complete()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self.seen += [f"{version}: {each.phase}, step {each.step}, {each.answers}" for each in records]
        steps = [each.step for each in records]
        self.steps_back += sum(later < earlier for earlier, later in pairwise(steps))
        return records[-1]

    def _is_at(self, record: RolloutRecord, step: int) -> bool:
        return record.is_over or (record.phase == "running" and record.step >= step)

    def _start(self, request: dict[str, Any]) -> None:
        managers = [f"{self.bed.hosts.address(host)}:7400" for host in MANAGER_HOSTS]
        with ClusterClient(managers, DEADLINE_S) as client:
            client.call("StartRollout", cluster_pb2.StartRolloutRequest(plan=json.dumps(request)))

    async def _watch(self, records: list[RolloutRecord], revision: int) -> None:
        async for changes in self.bed.store.watch(ROLLOUTS, revision):
            records += [RolloutRecord.model_validate_json(each.value) for each in changes if each.value is not None]
