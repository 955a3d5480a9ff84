"""Tables, jobs and workers for the router's tests."""

from math import inf
from random import Random
from typing import TypeVar, get_args

from penstock.core.requests import InferRequest
from penstock.core.settings import Health, Policy, Priorities, QueuePolicy, Routing
from penstock.router.actions import Action, FailJob, SendJob
from penstock.router.deadlines import Deadlines
from penstock.router.jobs import JobTable
from penstock.router.queues import BlockRules
from penstock.router.slots import Job, Offer

T = TypeVar("T")
A, B, C = b"worker-a", b"worker-b", b"worker-c"
BLOCK = "blk"
POLICIES: tuple[str, ...] = get_args(Policy)


def job(
    job_id: int,
    deadline: float = 100.0,
    is_idempotent: bool = True,
    *,
    key: str = "",
    session: str = "",
    home: bytes = b"",
    priority: int = 1,
    queue_deadline: float = inf,
) -> Job:
    return Job(
        job_id,
        BLOCK,
        InferRequest("m", []),
        deadline,
        is_idempotent,
        session=session,
        home=home,
        key=key,
        priority=priority,
        queue_deadline=queue_deadline,
    )


def rules(
    policy: str = "power_of_two",
    max_queue: int = 4,
    *,
    without_key: str = "any",
    key: str = "",
    health: Health | None = None,
    priorities: Priorities | None = None,
) -> BlockRules:
    routing = Routing.model_validate({"policy": policy, "without_key": without_key, "key": key})
    return BlockRules(max_queue, routing, health or Health(), priorities or Priorities())


def levels(count: int, **by_level: QueuePolicy) -> Priorities:
    """Return priorities; `level_2=QueuePolicy(...)` sets the policy of level 2."""
    return Priorities(
        levels=count, by_level={int(name.removeprefix("level_")): policy for name, policy in by_level.items()}
    )


def table(declared: BlockRules | None = None, max_attempts: int = 3, seed: int = 0) -> JobTable:
    made = JobTable(Random(seed).random, max_attempts)
    made.declare_block(BLOCK, declared or rules())
    return made


def join(jobs: JobTable, worker: bytes, credits: int = 4, now: float = 0.0, **said: float) -> list[Action]:
    offer = Offer(BLOCK, credits, worker.decode(), said.get("weight", 1.0), int(said.get("distance", 0)))
    return jobs.join(worker, [offer], now)


def sent(actions: list[Action]) -> list[tuple[bytes, int]]:
    return [(action.worker, action.job.job_id) for action in actions if isinstance(action, SendJob)]


def failed(actions: list[Action]) -> list[int]:
    return [action.job.job_id for action in actions if isinstance(action, FailJob)]


def next_due(jobs: JobTable) -> float | None:
    """Return when the table's next tick has something to do."""
    if jobs._changed_rules:
        return 0.0
    due = [*times(jobs._deadlines), *times(jobs._queue_deadlines), *times(jobs._ejections._probes)]
    return min(due, default=None)


def times(deadlines: Deadlines[T]) -> list[float]:
    """Return the due times of all entries that still count."""
    return [when for when, _, key in deadlines._heap if deadlines._is_current(key, when)]
