"""The cost of the router's decisions: placing a job and handling its answer, with 10 and with 1,000 workers.

`python -m benchmarks.suite.decisions` prints it as JSON: policy to rounds of microseconds with few and many workers.
"""

import gc
import json
import time
from collections import deque
from random import Random
from typing import get_args

from penstock.core.requests import InferRequest
from penstock.core.settings import Policy, Routing
from penstock.router.actions import SendJob
from penstock.router.jobs import JobTable
from penstock.router.queues import BlockRules
from penstock.router.slots import Job, Offer

FEW, MANY = 10, 1000
IN_FLIGHT = 32  # the same traffic, whatever the number of workers
CREDITS = 16
KEYS = 10_000
JOBS = 5000  # jobs per round
BLOCK = "blk-decisions"
POLICIES: tuple[Policy, ...] = get_args(Policy)


class _Traffic:
    """A steady stream of jobs through one table: each new job ends the oldest running one."""

    def __init__(self, policy: Policy, workers: int) -> None:
        self._table = JobTable(Random(workers).random)
        self._table.declare_block(BLOCK, BlockRules(max_queue=100_000, routing=Routing(policy=policy)))
        for n in range(workers):
            name = f"worker-{n}"
            self._table.join(name.encode(), [Offer(BLOCK, CREDITS, name, 1.0 + n % 3, n % 3)], 0.0)
        self._request = InferRequest("m", [])
        self._running: deque[Job] = deque()
        self._made = 0
        self.run(JOBS)

    def run(self, jobs: int) -> float:
        """Return microseconds of processor time per job, without making the jobs."""
        first = self._made
        self._made += jobs
        made = [
            Job(number, BLOCK, self._request, number + 1e6, key=f"key-{number % KEYS}")
            for number in range(first, self._made)
        ]
        table, running = self._table, self._running
        start = time.process_time()
        for job in made:
            now = job.job_id * 1e-4
            for action in table.submit(job, now):
                if isinstance(action, SendJob):
                    running.append(action.job)
            while len(table) > IN_FLIGHT:
                oldest = running.popleft()
                assert oldest.slot is not None
                _, actions = table.complete(oldest.slot.worker, oldest.job_id, oldest.attempt, now)
                running.extend(action.job for action in actions if isinstance(action, SendJob))
        return (time.process_time() - start) / jobs * 1e6


def measure_decisions(rounds: int = 7) -> dict[str, list[tuple[float, float]]]:
    """Return microseconds per job with 10 and with 1,000 workers, for each policy and round."""
    traffic = {policy: (_Traffic(policy, FEW), _Traffic(policy, MANY)) for policy in POLICIES}
    found: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    was_collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection takes as long as everything else in the process is large
    try:
        for _ in range(rounds):
            for policy, (few, many) in traffic.items():
                found[policy].append((few.run(JOBS), many.run(JOBS)))
    finally:
        if was_collecting:
            gc.enable()
    return found


if __name__ == "__main__":
    print(json.dumps(measure_decisions()))
