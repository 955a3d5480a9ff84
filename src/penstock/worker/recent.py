"""The last step of each ordered session on this worker, for a gateway that asks in place of one that died.

A session's steps run one after the other, so the last one alone may be asked for again: it is joined while it runs, and
answered from here when it has. Decides; never acts.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.core.errors import CONCLUSIVE, PenstockError
from penstock.core.requests import SessionStep
from penstock.core.tensors import Tensor
from penstock.worker.job import WorkerJob

KEPT_S = 120.0  # after which nobody asks any more
MAX_BYTES = 64 * 1024 * 1024  # of answers; beyond it the oldest go
MAX_STEPS = 100_000
OVERHEAD_BYTES = 1024  # about what an answer takes beside its tensors

Asker = tuple[object, int, int]  # a link, its job's id and attempt


@dataclass(slots=True, eq=False)
class RecentStep:
    key: tuple[str, str]  # block and session
    life: int
    seq_no: int
    job: WorkerJob
    began: float
    outcome: list[Tensor] | PenstockError | None = None  # None: it runs
    askers: list[Asker] = field(default_factory=list)  # beside the one whose job it is
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
        """The same step, where it runs or ran here."""
        found = self._steps.get((block_id, step.session_id))
        return found if found is not None and (found.life, found.seq_no) == (step.life, step.seq_no) else None

    def step_of(self, job: WorkerJob) -> RecentStep | None:
        return self._by_job.get(job)

    def begin(self, block_id: str, job: WorkerJob, now: float) -> None:
        step = job.session
        assert step is not None, "the job has no session"
        key = (block_id, step.session_id)
        self._drop(key)
        recent = RecentStep(key, step.life, step.seq_no or 0, job, now)
        self._steps[key] = self._by_job[job] = recent
        self._size_bytes += recent.size_bytes
        for old in list(self._too_many(now)):
            self._drop(old)

    def done(self, job: WorkerJob, outcome: list[Tensor] | PenstockError) -> RecentStep | None:
        """The step with who else has to hear of it; None: it is no step that is kept."""
        recent = self._by_job.pop(job, None)
        if recent is None:
            return None
        recent.outcome = outcome
        is_kept = not isinstance(outcome, PenstockError) or isinstance(outcome, CONCLUSIVE)
        if self._steps.get(recent.key) is recent:
            if not is_kept:
                self._drop(recent.key)
            elif not isinstance(outcome, PenstockError):
                size_bytes = sum([len(tensor.data) for tensor in outcome])
                recent.size_bytes += size_bytes
                self._size_bytes += size_bytes
        return recent

    def forget(self, job: WorkerJob) -> RecentStep | None:
        """It does not run, or not any more: whoever asks for it next runs it."""
        recent = self._by_job.pop(job, None)
        if recent is not None and self._steps.get(recent.key) is recent:
            self._drop(recent.key)
        return recent

    def _too_many(self, now: float) -> Iterator[tuple[str, str]]:
        size_bytes, steps = self._size_bytes, len(self._steps)
        for key, recent in self._steps.items():
            is_over = size_bytes > self._max_bytes or steps > self._max_steps
            if not is_over and recent.began + KEPT_S > now:
                return
            if recent.outcome is not None:
                yield key
                size_bytes -= recent.size_bytes
                steps -= 1

    def _drop(self, key: tuple[str, str]) -> None:
        recent = self._steps.pop(key, None)
        if recent is not None:
            self._size_bytes -= recent.size_bytes
