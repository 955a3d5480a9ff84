"""A block that generates text: its engine runs many requests at once, and tells step by step what each has got."""

import asyncio
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from typing import NamedTuple

from penstock.core.errors import DeadlineExceeded, PenstockError, QueueTimeout
from penstock.core.generation import GenerationStep
from penstock.core.tensors import Tensor
from penstock.engines.base import GeneratingEngine
from penstock.models.loading import LoadedBlock
from penstock.tasks.base import Prepared
from penstock.tasks.generate.answer import GenerationAnswer
from penstock.worker.job import WorkerJob
from penstock.worker.offload.pool import TaskPool
from penstock.worker.running.batcher import DELAYED, Batch
from penstock.worker.running.budget import delaying_levels
from penstock.worker.running.generation_counts import GenerationCounts, TokenPace
from penstock.worker.running.instances import BatchOutcome
from penstock.worker.running.runner import BlockRunner, WorkerTools

now = time.monotonic


@dataclass(slots=True, eq=False)
class _Generating:
    """A job whose generations are with the engine."""

    job: WorkerJob
    prepared: Prepared
    answer: GenerationAnswer
    credits: int  # answers that may be sent before the last
    numbers: list[int] = field(default_factory=list)  # of its generations
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    started: float = 0.0  # 0: it has not


class _Given(NamedTuple):
    """A generation that the engine has."""

    generating: _Generating
    position: int  # among the job's
    pace: TokenPace


class GenerationRunner(BlockRunner):
    """Whole answers are given when all is there. Of a streamed one goes out what there is as often as its reader
    allows: what comes meanwhile is joined, so that a slow reader slows nobody, and holds no more than its answer."""

    close_s = 5.0  # the engine's process may be ended at any time
    counts_as = GenerationCounts
    counts: GenerationCounts

    def __init__(
        self, loaded: LoadedBlock, engine: GeneratingEngine, tools: WorkerTools, tasks: TaskPool | None = None
    ) -> None:
        super().__init__(loaded, tools, tasks, _Errands(engine), 1)
        self._generator = engine
        self._task = loaded.task
        self._delaying = delaying_levels(loaded.description.settings.priorities)
        self._numbers = count(1)
        self._generating: dict[WorkerJob, _Generating] = {}
        self._by_number: dict[int, _Given] = {}
        self._started = 0  # jobs
        engine.start(self._tell)

    @property
    def waiting(self) -> int:
        return len(self._jobs) - self._started

    @property
    def idle(self) -> int:
        return 0 if self._started else 1

    def allow(self, job: WorkerJob, credits: int) -> None:
        generating = self._generating.get(job)
        if generating is None:
            job.response_credits += credits  # it is being prepared
            return
        generating.credits += credits
        if generating.answer.is_streamed and generating.answer.has_news:
            self._send(generating, now())

    # --- to the engine

    def _prepared(self, job: WorkerJob, outcome: Prepared | PenstockError) -> None:
        if job.is_gone:
            return
        if isinstance(outcome, PenstockError):
            self._end(job, outcome)
            return
        job.prepared = outcome
        answer: GenerationAnswer = outcome.context
        if not job.response_credits:
            answer.is_streamed = False
        generating = self._generating[job] = _Generating(job, outcome, answer, job.response_credits)
        self._watch(generating, job.deadline, self._expire_late)
        if job.queue_deadline < inf:
            self._watch(generating, job.queue_deadline, self._expire_waiting)
        self._submit(generating, job.priority)

    def _submit(self, generating: _Generating, priority: int) -> None:
        for position, generation in enumerate(generating.answer.generations):
            number = next(self._numbers)
            generating.numbers.append(number)
            self._by_number[number] = _Given(generating, position, TokenPace(generating.job.arrived))
            self._generator.add(number, generation if priority == 1 else replace(generation, priority=priority))

    def _withdraw(self, generating: _Generating) -> None:
        """What the engine still has of it is not wanted any more."""
        for number in generating.numbers:
            if self._by_number.pop(number, None) is not None:
                self._generator.cancel(number)
        generating.numbers.clear()

    # --- time

    def _watch(self, generating: _Generating, at: float, ring: Callable[[_Generating], None]) -> None:
        generating.timers.append(self._loop.call_later(max(0.0, at - now()), ring, generating))

    def _expire_late(self, generating: _Generating) -> None:
        where = "before the model had given its whole answer" if generating.started else "while the request waited"
        self._end(generating.job, DeadlineExceeded(f"the deadline passed {where} on the worker"))

    def _expire_waiting(self, generating: _Generating) -> None:
        job = generating.job
        if generating.started:
            return
        if job.priority in self._delaying:
            self._withdraw(generating)
            self._submit(generating, job.priority + DELAYED)
        else:
            why = f"it waited longer than the queue policy of level {job.priority} allows; try again later"
            self._end(job, QueueTimeout(why))

    # --- from the engine

    def _tell(self, step: GenerationStep) -> None:
        """Called in a thread of the engine's."""
        try:
            self._loop.call_soon_threadsafe(self._take, step)
        except RuntimeError:
            pass  # the loop has closed: the process is leaving

    def _take(self, step: GenerationStep) -> None:
        """One turn of the loop for all that a step has brought."""
        at = now()
        self.counts.stepped(step.standing, at)
        news: dict[_Generating, None] = {}
        for progress in step.progress:
            found = self._by_number.get(progress.number)
            if found is None:  # it was cancelled meanwhile
                continue
            generating, position, pace = found
            self.counts.heard(pace, progress, at)
            if progress.failure is not None:
                del self._by_number[progress.number]
                self._end(generating.job, copy(progress.failure))  # one each: who raises it leaves marks on it
                continue
            if not generating.started:
                self._start(generating, at)
            answer = generating.answer
            answer.add(position, progress)
            if not answer.first_token_ns and answer.completion_tokens:
                answer.first_token_ns = int((at - pace.arrived) * 1e9)
            if progress.is_over:
                del self._by_number[progress.number]
                if answer.is_over:
                    news.pop(generating, None)
                    self._finish(generating, at)
                    continue
            if answer.is_streamed and generating.credits and answer.has_news:
                news[generating] = None
        for generating in news:
            if not generating.job.is_gone:
                self._send(generating, at)

    def _start(self, generating: _Generating, at: float) -> None:
        generating.started = at
        generating.job.has_started = True
        generating.job.timing.queue_ns = int((at - generating.job.arrived) * 1e9)
        self._started += 1

    def _send(self, generating: _Generating, at: float) -> None:
        """One answer of several."""
        if not generating.credits:
            return
        generating.credits -= 1
        generating.job.reply(generating.job, self._tensors(generating, at), True)

    def _finish(self, generating: _Generating, at: float) -> None:
        self._end(generating.job, self._tensors(generating, at))

    def _tensors(self, generating: _Generating, at: float) -> list[Tensor]:
        job = generating.job
        job.timing.compute_ns = int((at - generating.started) * 1e9)
        return self._task.finish(job.request, generating.prepared, ())

    # --- jobs end

    def close(self) -> asyncio.Event:
        closed = super().close()
        self.counts.stop()
        return closed

    def _forget(self, job: WorkerJob) -> None:
        super()._forget(job)
        generating = self._generating.pop(job, None)
        if generating is None:
            return
        for timer in generating.timers:
            timer.cancel()
        if generating.started:
            self._started -= 1
        self._withdraw(generating)

    def _traced(self, job: WorkerJob) -> dict[str, int]:
        if job.prepared is None:
            return {}
        answer: GenerationAnswer = job.prepared.context
        return {
            "first_token_ns": answer.first_token_ns,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
        }


class _Errands:
    """What the runner's thread does: the engine has its own for the rest."""

    def __init__(self, engine: GeneratingEngine) -> None:
        self._engine = engine

    def run(self, instance: int, batch: Batch) -> BatchOutcome:
        raise AssertionError("nothing is batched here")

    def probe(self, instance: int) -> str:
        return self._engine.probe(instance)
