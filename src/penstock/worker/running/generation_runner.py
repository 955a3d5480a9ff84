"""The runner of a generating block, whose engine runs many requests at once and reports progress after each step."""

import asyncio
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from typing import NamedTuple

from penstock.core.errors import DeadlineExceeded, PenstockError, QueueTimeout, get_message
from penstock.core.generation import GenerationStep
from penstock.core.tensors import Tensor
from penstock.models.loading import LoadedBlock
from penstock.tasks.base import Prepared
from penstock.tasks.generate.answer import GenerationAnswer
from penstock.worker.offload.task_pool import TaskPool
from penstock.worker.running.batcher import DELAYED
from penstock.worker.running.block_runner import BlockRunner, WorkerTools
from penstock.worker.running.budget import delaying_levels
from penstock.worker.running.generation_counts import GenerationCounts, TokenPace
from penstock.worker.running.instances import close_in_thread
from penstock.worker.worker_job import WorkerJob

now = time.monotonic


@dataclass(slots=True, eq=False)
class _GenerationJob:
    """A job whose generations the engine has accepted."""

    job: WorkerJob
    prepared: Prepared
    answer: GenerationAnswer
    credits: int  # number of answers that may be sent before the last answer
    numbers: list[int] = field(default_factory=list)  # by which the engine knows the job's generations
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    started: float = 0.0  # 0: not started


class _SubmittedGeneration(NamedTuple):
    """A generation that the engine has accepted."""

    generating: _GenerationJob
    position: int  # among the job's generations
    pace: TokenPace


class GenerationRunner(BlockRunner):
    """Passes generations to the engine, and sends their answers: complete at the end, or streamed in parts.

    Tokens that arrive while the client's stream has no credit are joined into the next message, so that a slow client
    delays no other request and needs no more memory than its answer.
    """

    counts_type = GenerationCounts
    counts: GenerationCounts

    def __init__(self, loaded: LoadedBlock, tools: WorkerTools, tasks: TaskPool | None = None) -> None:
        super().__init__(loaded, tools, tasks)
        self._engine = loaded.generating_engine
        self._task = loaded.task
        self._delaying = delaying_levels(loaded.description.settings.priorities)
        self._numbers = count(1)
        self._generating: dict[WorkerJob, _GenerationJob] = {}
        self._by_number: dict[int, _SubmittedGeneration] = {}
        self._started = 0  # number of jobs whose generations have started
        self._engine.start(self._report)

    @property
    def waiting(self) -> int:
        return len(self._jobs) - self._started

    @property
    def idle(self) -> int:
        return 0 if self._started else 1

    def allow(self, job: WorkerJob, credits: int) -> None:
        generating = self._generating.get(job)
        if generating is None:
            job.response_credits += credits  # the job is still being prepared
            return
        generating.credits += credits
        if generating.answer.is_streamed and generating.answer.has_news:
            self._send_part(generating, now())

    # --- to the engine

    def on_prepared(self, job: WorkerJob, outcome: Prepared | PenstockError) -> None:
        if job.is_gone:
            return
        if isinstance(outcome, PenstockError):
            self.end(job, outcome)
            return
        job.prepared = outcome
        answer: GenerationAnswer = outcome.context
        if not job.response_credits:
            answer.is_streamed = False
        generating = self._generating[job] = _GenerationJob(job, outcome, answer, job.response_credits)
        self._start_timer(generating, job.deadline, self._fail_at_deadline)
        if job.queue_deadline < inf:
            self._start_timer(generating, job.queue_deadline, self._apply_queue_policy)
        self._submit_generations(generating, job.priority)

    def _submit_generations(self, generating: _GenerationJob, priority: int) -> None:
        for position, generation in enumerate(generating.answer.generations):
            number = next(self._numbers)
            generating.numbers.append(number)
            self._by_number[number] = _SubmittedGeneration(generating, position, TokenPace(generating.job.arrived))
            self._engine.add(number, generation if priority == 1 else replace(generation, priority=priority))

    def _cancel_generations(self, generating: _GenerationJob) -> None:
        """Cancel the job's remaining generations in the engine."""
        for number in generating.numbers:
            if self._by_number.pop(number, None) is not None:
                self._engine.cancel(number)
        generating.numbers.clear()

    # --- time

    def _start_timer(self, generating: _GenerationJob, at: float, callback: Callable[[_GenerationJob], None]) -> None:
        generating.timers.append(self._loop.call_later(max(0.0, at - now()), callback, generating))

    def _fail_at_deadline(self, generating: _GenerationJob) -> None:
        where = "before the model had finished its answer" if generating.started else "while the request waited"
        self.end(generating.job, DeadlineExceeded(f"the deadline passed {where} on the worker"))

    def _apply_queue_policy(self, generating: _GenerationJob) -> None:
        job = generating.job
        if generating.started:
            return
        if job.priority in self._delaying:
            self._cancel_generations(generating)
            self._submit_generations(generating, job.priority + DELAYED)
        else:
            why = f"the request waited longer than its queue policy (level {job.priority}) allows; try again later"
            self.end(job, QueueTimeout(why))

    # --- from the engine

    def _report(self, step: GenerationStep) -> None:
        """Pass the results of a step to the event loop. Called in a thread of the engine."""
        try:
            self._loop.call_soon_threadsafe(self._process_step, step)
        except RuntimeError:
            pass  # the loop has closed: the process is ending

    def _process_step(self, step: GenerationStep) -> None:
        """Process the progress of all generations in a step."""
        at = now()
        self.counts.count_step(step.state, at)
        news: dict[_GenerationJob, None] = {}
        for progress in step.progress:
            found = self._by_number.get(progress.number)
            if found is None:  # the generation was cancelled meanwhile
                continue
            generating, position, pace = found
            self.counts.count(pace, progress, at)
            if progress.failure is not None:
                del self._by_number[progress.number]
                self.end(generating.job, copy(progress.failure))  # a copy, as raising an exception changes it
                continue
            if not generating.started:
                self._record_start(generating, at)
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
                self._send_part(generating, at)

    def _record_start(self, generating: _GenerationJob, at: float) -> None:
        generating.started = at
        generating.job.has_started = True
        generating.job.timing.queue_ns = int((at - generating.job.arrived) * 1e9)
        self._started += 1

    def _send_part(self, generating: _GenerationJob, at: float) -> None:
        """Send one part of a streamed answer."""
        if not generating.credits:
            return
        generating.credits -= 1
        generating.job.reply(generating.job, self._answer_tensors(generating, at), True)

    def _finish(self, generating: _GenerationJob, at: float) -> None:
        self.end(generating.job, self._answer_tensors(generating, at))

    def _answer_tensors(self, generating: _GenerationJob, at: float) -> list[Tensor]:
        job = generating.job
        job.timing.compute_ns = int((at - generating.started) * 1e9)
        return self._task.finish(job.request, generating.prepared, ())

    # --- jobs end

    def close(self) -> asyncio.Event:
        closed = super().close()
        self.counts.stop()
        return closed

    def _close_engine(self) -> asyncio.Event:
        return close_in_thread(self._engine.close)

    def _probe_engine(self) -> None:
        probing = self._loop.run_in_executor(None, self._engine.probe)
        probing.add_done_callback(self._report_probe)

    def _report_probe(self, probing: "asyncio.Future[str]") -> None:
        try:
            problem = probing.result()
        except Exception as error:  # noqa: BLE001 - a failing probe is the problem
            problem = get_message(error)
        self._on_probed(problem)

    def _forget(self, job: WorkerJob) -> None:
        super()._forget(job)
        generating = self._generating.pop(job, None)
        if generating is None:
            return
        for timer in generating.timers:
            timer.cancel()
        if generating.started:
            self._started -= 1
        self._cancel_generations(generating)

    def _span_fields(self, job: WorkerJob) -> dict[str, int]:
        if job.prepared is None:
            return {}
        answer: GenerationAnswer = job.prepared.context
        return {
            "first_token_ns": answer.first_token_ns,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
        }
