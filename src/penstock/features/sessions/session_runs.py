"""Runs the steps of the session table, each step in its own task, and delivers the outcomes to the callers."""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InternalError, Overloaded, PenstockError, SessionError, SessionMoved
from penstock.core.requests import AnswerSink, InferRequest, InferResponse, Parameter, Timing
from penstock.features.sessions.session import (
    Action,
    DeliverOutcome,
    Session,
    SessionRecord,
    StartStep,
    Step,
    StopStep,
    Ticket,
)
from penstock.features.sessions.session_answers import (
    Answered,
    Outcome,
    StreamedAnswers,
    estimate_answer_bytes,
    list_answers,
)
from penstock.features.sessions.session_errors import make_draining_error, make_session_moved_error
from penstock.features.sessions.session_table import SessionTable, is_conclusive
from penstock.features.sessions.stored_sessions import StoredSessions

log = structlog.get_logger()
now = time.monotonic
STEP, REPEAT = "session_step", "session_repeat"  # parameters of answers
SHORTEST_S = 0.001  # shortest timer, so that a timer that fired a little early is not set again with zero delay

# Limits on the streamed answers to one request that are remembered; above them, only the last is remembered.
MAX_REMEMBERED_ANSWERS = 1024
MAX_REMEMBERED_BYTES = 4 * 1024 * 1024

Run = Callable[[BlockDescription, InferRequest, float], Coroutine[Any, Any, InferResponse]]


@dataclass(slots=True, eq=False)
class _Caller:
    """A request in a session, and the future of its outcome."""

    block: BlockDescription
    request: InferRequest
    run: Run
    # Errors are results here, too, because a cancelled caller would leave an exception unretrieved.
    future: asyncio.Future[DeliverOutcome]
    position: int = 0  # of the step that runs with this request; 0: no step runs with it

    def run_step(self, deadline: float) -> Coroutine[Any, Any, Answered]:
        """Run the step with this caller's request."""
        answers = self.request.answers
        if answers is None:
            return self.run(self.block, self.request, deadline)
        return self._run_stream(_StepAnswers(answers, self.position), deadline)

    async def _run_stream(self, answers: "_StepAnswers", deadline: float) -> StreamedAnswers:
        answers.remember(await self.run(self.block, replace(self.request, answers=answers), deadline))
        return answers.get_remembered()


class _StepAnswers:
    """Passes a step's answers to its caller, and remembers the answers for repeats unless there are too many."""

    def __init__(self, to: AnswerSink, position: int) -> None:
        self._to = to
        self._position = position
        self._answers: list[InferResponse] = []
        self._size_bytes = 0
        self._is_complete = True

    @property
    def has_begun(self) -> bool:
        return self._to.has_begun

    def begin(self, ahead: int, allow: Callable[[int], None]) -> None:
        self._to.begin(ahead, allow)

    def put(self, answer: InferResponse) -> bool:
        if not self._to.put(replace(answer, parameters={**answer.parameters, STEP: self._position})):
            return False
        self.remember(answer)
        return True

    def remember(self, answer: InferResponse) -> None:
        self._size_bytes += estimate_answer_bytes(answer)
        if len(self._answers) >= MAX_REMEMBERED_ANSWERS or self._size_bytes > MAX_REMEMBERED_BYTES:
            self._is_complete = False
        if not self._is_complete:
            self._answers.clear()
        self._answers.append(answer)

    def get_remembered(self) -> StreamedAnswers:
        return StreamedAnswers(tuple(self._answers), self._is_complete)


class SessionRuns:
    """Owns the session table and the tasks of running steps. Used from one event loop."""

    def __init__(self, limits: Limits, stored: StoredSessions | None = None) -> None:
        """Create an empty table. With `stored`, each step is recorded in the store before and after it runs."""
        self._stored = stored
        share = limits.session_share
        self._table = SessionTable(
            max_waiting=limits.max_inflight_requests * share,
            max_waiting_bytes=limits.max_inflight_bytes * share,
            first_life=secrets.randbits(62),
        )
        self._callers: dict[Ticket, _Caller] = {}
        self._tasks: dict[Step, asyncio.Task[Answered]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._is_closed = False
        self._replaced_blocks: dict[str, dict[str, float]] = {}  # by block: the blocks that it replaced, and when
        self._idle_events: dict[Session, asyncio.Event] = {}  # set when a session that is to move has no running step

    async def run(
        self, block: BlockDescription, request: InferRequest, deadline: float, run: Run, epoch: int = 0
    ) -> InferResponse:
        """Run the request as a step of its session; return its last answer or raise its error.

        Raise SessionError or Overloaded at once if the step cannot be added. Callers of the same step share one run,
        which continues when they are cancelled, unless it streams answers to the cancelled caller. If the shared run
        streams, the other callers get its answers at its end. `epoch` is the ownership epoch; 0 without a store.
        """
        future: asyncio.Future[DeliverOutcome] = asyncio.get_running_loop().create_future()
        ticket = _make_ticket(block, request, deadline, epoch)
        caller = self._callers[ticket] = _Caller(block, request, run, future)
        try:
            self._perform_actions(self._table.add_request(ticket, now()))
            self._set_timer()
            given = await future
        finally:
            step = ticket.step
            self._perform_actions(self._table.caller_left(ticket, now()))
            del self._callers[ticket]
            if step is not None and caller.position and request.answers is not None:
                self._tasks[step].cancel()
        return _get_last_answer(given, request, is_own=caller.position > 0)

    def worker_lost(self, worker: bytes, block_ids: Iterable[str]) -> None:
        """End the sessions whose model state was on a worker that no longer holds these blocks."""
        self._perform_actions(self._table.worker_lost(worker, block_ids, now()))

    def retire_block(self, block_id: str, error: PenstockError, successor: BlockDescription | None = None) -> None:
        """Withdraw a block. Its sessions continue on its successor; without a successor, their waiting steps fail."""
        if self._stored is not None and successor is not None:
            # The sessions are in the store: the next request of each moves it to the successor.
            old = self._replaced_blocks.setdefault(successor.block_id, {})
            old[block_id] = now()
            successor = None
        inherits = None if successor is None else (successor.block_id, successor.settings.sessions)
        self._perform_actions(self._table.retire_block(block_id, error, inherits, now()))

    def find(self, block_id: str, session_id: str) -> Session | None:
        return self._table.find(block_id, session_id)

    def list_session_keys(self) -> list[tuple[str, str]]:
        return self._table.list_session_keys()

    def owners_changed(self, is_own: Callable[[str], bool]) -> None:
        """Handle a change of gateways: fail the waiting steps of sessions that another gateway owns now."""
        self._perform_actions(self._table.owners_changed(is_own))

    async def transfer_out(self, block_id: str, session_id: str) -> SessionRecord | None:
        """Remove a session for another gateway, after its running step has ended; return its record, or None."""
        session = self._table.find(block_id, session_id)
        if session is None:
            return None
        if session in self._idle_events:
            raise make_session_moved_error(session)  # another transfer of the session is in progress
        is_idle = self._idle_events[session] = asyncio.Event()
        try:
            while True:
                self._perform_actions(self._table.start_transfer(session))
                if session.running is None:
                    break
                is_idle.clear()
                await is_idle.wait()
        finally:
            del self._idle_events[session]
        if not session.is_in_table:
            return None
        record = self._table.remove(session)
        if self._stored is not None:
            await self._stored.release(block_id, session)
        return record

    def transfer_in(self, block: BlockDescription, session_id: str, record: SessionRecord, epoch: int = 0) -> None:
        self._table.insert(block.block_id, block.settings.sessions, session_id, record, epoch, now())

    def list_replaced_blocks(self, block: BlockDescription) -> list[str]:
        """Return the blocks that this block replaced recently enough for their sessions to continue."""
        found = self._replaced_blocks.get(block.block_id)
        if not found:
            return []
        since = now() - block.settings.sessions.idle_s
        return [block_id for block_id, at in found.items() if at > since]

    def tick(self) -> None:
        """Remove sessions that were idle for too long; to be called regularly. Deadlines have a timer of their own."""
        self._perform_actions(self._table.tick(now()))
        self._set_timer()

    def count_sessions(self) -> dict[str, int]:
        return {
            "open": self._table.count_open_sessions(),
            "waiting": self._table.count_waiting_steps(),
            "repeats": self._table.repeats,
        }

    def drain(self) -> None:
        """Accept no more requests; fail requests that wait for an earlier request that has not arrived."""
        self._perform_actions(self._table.drain())

    async def close(self) -> None:
        """Fail waiting steps and cancel running ones."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._perform_actions(self._table.close())
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _perform_actions(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, DeliverOutcome):
                caller = self._callers.get(action.ticket)
                if caller is not None and not caller.future.done():
                    caller.future.set_result(action)
            elif isinstance(action, StartStep):
                self._start_step(action.step, action.ticket)
            elif isinstance(action, StopStep):
                self._tasks[action.step].cancel()

    def _start_step(self, step: Step, ticket: Ticket) -> None:
        caller = self._callers[ticket]
        caller.position = step.position
        run = caller.run_step(step.deadline) if self._stored is None else self._run_stored(self._stored, step, caller)
        task = asyncio.get_running_loop().create_task(run)
        self._tasks[step] = task
        # A callback, because a task that is cancelled before it starts would not reach its own `finally`.
        task.add_done_callback(partial(self._step_finished, step))

    async def _run_stored(self, stored: StoredSessions, step: Step, caller: _Caller) -> Answered:
        block_id = caller.block.block_id
        await stored.begin(block_id, step)
        try:
            answered = await caller.run_step(step.deadline)
        except PenstockError as error:
            if is_conclusive(error):
                await stored.end(block_id, step, error)
            raise
        await stored.end(block_id, step, answered)
        return answered

    def _step_finished(self, step: Step, task: asyncio.Task[Answered]) -> None:
        del self._tasks[step]
        outcome = self._get_task_outcome(task)
        session = step.session
        self._perform_actions(self._table.finish_step(step, outcome, now()))
        if isinstance(outcome, SessionMoved) and session.is_in_table and session.running is None:
            # The store has another owner: drop the session, so that the next request takes it from the store again.
            self._perform_actions(self._table.start_transfer(session))
            self._table.remove(session)
        if session.running is None and (is_idle := self._idle_events.get(session)) is not None:
            is_idle.set()

    def _get_task_outcome(self, task: asyncio.Task[Answered]) -> Outcome:
        if task.cancelled():
            if self._is_closed:
                return make_draining_error()
            return Overloaded("the request was cancelled because its caller had left; send it again")
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, PenstockError):
            return error
        log.error("session_step_failed", exc_info=error)
        return InternalError("the request failed with an unexpected error; see the server's log")

    def _set_timer(self) -> None:
        due = self._table.find_next_deadline()
        if due is None or self._is_closed or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(max(SHORTEST_S, due - now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.tick()


def _make_ticket(block: BlockDescription, request: InferRequest, deadline: float, epoch: int) -> Ticket:
    asked = request.controls.session
    assert asked is not None, "the request has no session"
    ticket = Ticket(block.block_id, block.settings.sessions, asked, deadline, request.size_bytes, epoch=epoch)
    if asked.is_start and asked.seq_no is not None:
        ticket.digest = _compute_input_digest(request)
    return ticket


def _get_last_answer(delivered: DeliverOutcome, request: InferRequest, *, is_own: bool) -> InferResponse:
    """Return the last answer, or raise the error.

    If the request streams and got no answers from a run of its own, put the earlier answers into `request.answers`.
    Each answer is a copy, because endpoints change answers and other callers may get the same outcome.
    """
    outcome = delivered.outcome
    if isinstance(outcome, PenstockError):
        raise copy(outcome)
    if isinstance(outcome, StreamedAnswers) and not (outcome.is_complete or is_own):
        raise SessionError("the request was answered before, with more answers than are stored for repeats")
    wanted = list_answers(outcome)
    if is_own or request.answers is None:
        wanted = wanted[-1:]
    parameters: dict[str, Parameter] = {STEP: delivered.position}
    if delivered.is_repeat:
        parameters[REPEAT] = True
    found = [
        replace(
            answer,
            model=request.model,
            request_id=request.request_id,
            parameters={**answer.parameters, **parameters},
            timing=Timing() if delivered.is_repeat else answer.timing,
        )
        for answer in wanted
    ]
    if request.answers is not None:
        for answer in found[:-1]:
            request.answers.put(answer)
    return found[-1]


def _compute_input_digest(request: InferRequest) -> bytes:
    found = blake2b(digest_size=16)
    for tensor in request.inputs:
        found.update(f"{tensor.name}\0{tensor.datatype}\0{tensor.shape}\0{len(tensor.data)}\0".encode())
        found.update(tensor.data)
    return found.digest()
