"""Keeps the last step of each ordered session on this worker, in case the session's gateway dies.

A session's steps run one after the other, so only the last one can be requested again, by a new gateway. If the step is
still running, the new gateway waits for its outcome; otherwise, it gets the outcome that is kept here. Pure: no I/O.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.core.errors import CONCLUSIVE_ERRORS, PenstockError
from penstock.core.requests import SessionStep
from penstock.core.tensors import Tensor
from penstock.worker.worker_job import WorkerJob

KEPT_S = 120.0  # how long a step is kept; a gateway requests a step again within this time
MAX_BYTES = 64 * 1024 * 1024  # of all kept answers; above it, the oldest are dropped
MAX_STEPS = 100_000
OVERHEAD_BYTES = 1024  # approximate size of an answer without its tensors

WaitingLink = tuple[object, int, int]  # a link, its job's id and attempt


@dataclass(slots=True, eq=False)
class RecentStep:
    key: tuple[str, str]  # block and session
    life: int
    seq_no: int
    job: WorkerJob
    began_at: float
    outcome: list[Tensor] | PenstockError | None = None  # None while the step is running
    waiting_links: list[WaitingLink] = field(
        default_factory=list
    )  # links that wait for the outcome, besides the link that brought the job
    size_bytes: int = OVERHEAD_BYTES


class RecentSteps:
    def __init__(self, max_bytes: int = MAX_BYTES, max_steps: int = MAX_STEPS) -> None:
        self._max_bytes = max_bytes
        self._max_steps = max_steps
        self._steps: OrderedDict[tuple[str, str], RecentStep] = OrderedDict()  # oldest first
        self._by_job: dict[WorkerJob, RecentStep] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, job: WorkerJob) -> bool:
        return job in self._by_job

    def find(self, block_id: str, step: SessionStep) -> RecentStep | None:
        """Return the kept step that equals `step` (session, `life` and `seq_no`), or None."""
        found = self._steps.get((block_id, step.session_id))
        return found if found is not None and (found.life, found.seq_no) == (step.life, step.seq_no) else None

    def find_by_job(self, job: WorkerJob) -> RecentStep | None:
        return self._by_job.get(job)

    def begin(self, block_id: str, job: WorkerJob, now: float) -> None:
        step = job.session
        assert step is not None, "the job has no session"
        key = (block_id, step.session_id)
        self._drop_step(key)
        recent = RecentStep(key, step.life, step.seq_no or 0, job, now)
        self._steps[key] = self._by_job[job] = recent
        self._size_bytes += recent.size_bytes
        for old in list(self._keys_to_drop(now)):
            self._drop_step(old)

    def finish(self, job: WorkerJob, outcome: list[Tensor] | PenstockError) -> RecentStep | None:
        """Record the outcome of a job's step and return the step, or None if the job's step is not kept."""
        recent = self._by_job.pop(job, None)
        if recent is None:
            return None
        recent.outcome = outcome
        is_kept = not isinstance(outcome, PenstockError) or isinstance(outcome, CONCLUSIVE_ERRORS)
        if self._steps.get(recent.key) is recent:
            if not is_kept:
                self._drop_step(recent.key)
            elif not isinstance(outcome, PenstockError):
                size_bytes = sum([len(tensor.data) for tensor in outcome])
                recent.size_bytes += size_bytes
                self._size_bytes += size_bytes
        return recent

    def remove(self, job: WorkerJob) -> RecentStep | None:
        """Forget a job's step, which did not run, so that the next request for this step runs it."""
        recent = self._by_job.pop(job, None)
        if recent is not None and self._steps.get(recent.key) is recent:
            self._drop_step(recent.key)
        return recent

    def _keys_to_drop(self, now: float) -> Iterator[tuple[str, str]]:
        size_bytes, steps = self._size_bytes, len(self._steps)
        for key, recent in self._steps.items():
            is_over = size_bytes > self._max_bytes or steps > self._max_steps
            if not is_over and recent.began_at + KEPT_S > now:
                return
            if recent.outcome is not None:
                yield key
                size_bytes -= recent.size_bytes
                steps -= 1

    def _drop_step(self, key: tuple[str, str]) -> None:
        recent = self._steps.pop(key, None)
        if recent is not None:
            self._size_bytes -= recent.size_bytes
