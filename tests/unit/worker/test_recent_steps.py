"""The last step of each ordered session: joined while it runs, repeated afterwards, and limited in number."""

from collections.abc import Callable

from penstock.core.errors import EngineFailed, Overloaded
from penstock.core.requests import SessionStep
from penstock.core.tensors import Tensor
from penstock.tasks.base import TaskRequest
from penstock.worker.recent_steps import KEPT_S, OVERHEAD_BYTES, RecentSteps
from penstock.worker.worker_job import WorkerJob

ANSWER = [Tensor("y", "UINT8", (100,), bytes(100))]


def step(session: str = "s", seq_no: int = 1, life: int = 7) -> SessionStep:
    return SessionStep(session, seq_no, life=life)


def job(session: SessionStep, reply: Callable[..., None] = lambda *_: None) -> WorkerJob:
    made = WorkerJob(1, 1, TaskRequest([], [], {}), 9.0, reply)
    made.session = session
    return made


def test_only_the_same_step_is_found() -> None:
    steps = RecentSteps()
    running = job(step())
    steps.begin("blk", running, 0.0)
    found = steps.find("blk", step())
    assert found is not None
    assert (found.job, found.outcome) == (running, None)
    for block_id, other in (("blk", step(seq_no=2)), ("blk", step(life=8)), ("blk", step("t")), ("blk-2", step())):
        assert steps.find(block_id, other) is None
    assert steps.finish(running, ANSWER) is found
    assert found.outcome == ANSWER
    assert running not in steps


def test_a_later_step_replaces_the_one_before() -> None:
    steps = RecentSteps()
    for seq_no in (1, 2):
        running = job(step(seq_no=seq_no))
        steps.begin("blk", running, 0.0)
        steps.finish(running, ANSWER)
    assert steps.find("blk", step(seq_no=1)) is None
    assert steps.find("blk", step(seq_no=2)) is not None
    assert len(steps) == 1


def test_a_step_that_may_run_again_is_not_kept() -> None:
    steps = RecentSteps()
    for outcome, is_kept in ((Overloaded("full"), False), (EngineFailed("broke"), True)):
        running = job(step())
        steps.begin("blk", running, 0.0)
        assert steps.finish(running, outcome) is not None
        assert (steps.find("blk", step()) is not None) is is_kept
    returned = job(step("t"))
    steps.begin("blk", returned, 0.0)
    assert steps.remove(returned) is not None
    assert steps.find("blk", step("t")) is None
    assert steps.finish(returned, ANSWER) is None


def test_the_oldest_steps_are_removed_if_they_are_many_or_old() -> None:
    steps = RecentSteps(max_bytes=4 * (OVERHEAD_BYTES + 100), max_steps=10)
    for number in range(6):
        running = job(step(f"s-{number}"))
        steps.begin("blk", running, float(number))
        steps.finish(running, ANSWER)
    assert [steps.find("blk", step(f"s-{number}")) is not None for number in range(6)] == [False] * 2 + [True] * 4
    steps.begin("blk", job(step("last")), 6.0 + KEPT_S)
    assert len(steps) == 1
    for number in range(20):
        steps.begin("blk", job(step(f"running-{number}")), 7.0 + KEPT_S)
    assert len(steps) == 21  # a running step is not removed
