"""Kill, cut off and stop workers under the load of direct clients: no request may fail."""

import asyncio
import json
import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.cluster import MANAGER_PORT, ClusterHosts
from benchmarks.waiting import until, until_seen
from penstock.client import AsyncClient
from penstock.core.errors import PenstockError
from tests.chaos.checked_load import Tally
from tests.chaos.cluster.workers import FAULTS
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import ECHO, ECHO_FLOATS, add_echo

MANAGER, GATEWAY, WORKERS = 0, 1, (2, 3, 4)
CALLERS = 6
DEADLINE_S = 20.0  # longer than it takes to notice that a worker is gone
PAUSE_S = 0.01
FAULT_S = 6.0
ANSWERS_BETWEEN_FAULTS = 150  # number
BACK_S = 60.0


@dataclass(slots=True)
class DirectLoad:
    target: str
    is_over: bool = False
    tally: Tally = field(default_factory=Tally)

    async def call(self) -> None:
        async with AsyncClient(self.target, timeout_s=DEADLINE_S, direct=True) as client:
            while not self.is_over:
                self.tally.sent += 1
                given = np.full((1, ECHO_FLOATS), self.tally.sent, np.float32)
                began = time.monotonic()
                try:
                    found = await client.infer(ECHO, {"x": given})
                except PenstockError as error:
                    self.tally.failures[f"{error.code}: {error.message}"[:200]] += 1
                else:
                    self.tally.answer(began, np.array_equal(found["y"], given))
                await asyncio.sleep(PAUSE_S)

    async def wait_answers(self, count: int) -> None:
        goal = self.tally.answered + count
        await until(lambda: self.tally.answered >= goal, f"{count} more answers", BACK_S)


async def run(plan: ChaosPlan) -> Result:
    models = plan.folder / "direct-models"
    add_echo(models)
    rounds = 1 if plan.is_quick else 3
    with ClusterHosts(1 + max(WORKERS), plan.folder / "direct") as hosts:
        join = f"{hosts.address(MANAGER)}:{MANAGER_PORT}"

        def start(host: int) -> None:
            hosts.worker(host, join, "--host", hosts.address(host), "--insecure")

        hosts.manager(MANAGER, models)
        hosts.gateway(GATEWAY, join)
        for host in WORKERS:
            start(host)
        hosts.wait_ready(GATEWAY)
        await _wait_until_complete(hosts)
        load = DirectLoad(f"{hosts.address(GATEWAY)}:50051")
        tasks = [asyncio.create_task(load.call()) for _ in range(CALLERS)]
        for number, (name, fault) in enumerate([*FAULTS.items()] * rounds):
            await load.wait_answers(ANSWERS_BETWEEN_FAULTS)
            plan.say(name)
            undo = await fault(hosts, WORKERS[number % len(WORKERS)], start)
            await asyncio.sleep(FAULT_S)
            await undo()
            await _wait_until_complete(hosts)
        await load.wait_answers(ANSWERS_BETWEEN_FAULTS)
        load.is_over = True
        await asyncio.gather(*tasks)
        routed = _count_routed_requests(hosts)
    result = Result(details=load.tally.details() | {"routed": routed})
    result.must("direct_failed", load.tally.failed, high=0)
    result.must(
        "direct_answered", 1 - routed / load.tally.answered, low=0.5
    )  # otherwise the faults affected no direct request
    return result


async def _wait_until_complete(hosts: ClusterHosts) -> None:
    await until_seen(lambda: len(hosts.workers(GATEWAY)) == len(WORKERS), "every worker is there", BACK_S)


def _count_routed_requests(hosts: ClusterHosts) -> float:
    """Return the number of requests that the gateway has served."""
    metrics = json.loads(hosts.http(GATEWAY, "/metrics.json")[1])
    samples = [sample for metric in metrics.values() for sample in metric["samples"]]
    return float(sum(each["value"] for each in samples if each["name"] == "penstock_requests_total"))
