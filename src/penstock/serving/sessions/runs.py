"""The shell around the session table: runs its steps, each in a task of its own, and hands callers their outcomes."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InternalError, Overloaded, PenstockError, SessionError, SessionMoved
from penstock.core.requests import InferRequest, InferResponse, Parameter, Timing
from penstock.serving.sessions.answers import Answered, ManyAnswers, Outcome, answer_bytes, answers_of
from penstock.serving.sessions.faults import draining, moved
from penstock.serving.sessions.parts import (
    Action,
    GiveOutcome,
    Session,
    SessionRecord,
    StartStep,
    Step,
    StopStep,
    Ticket,
)
from penstock.serving.sessions.stored import StoredSessions
from penstock.serving.sessions.table import SessionTable, is_conclusive

log = structlog.get_logger()
now = time.monotonic
STEP, REPEAT = "session_step", "session_repeat"  # parameters of answers
SHORTEST_S = 0.001  # a timer may fire a little early: it must not be set again for no time at all

# Of the answers that a decoupled model gives to one request, more are not kept.
MAX_KEPT_ANSWERS = 1024
MAX_KEPT_BYTES = 4 * 1024 * 1024

Run = Callable[[BlockDescription, InferRequest, float], Coroutine[Any, Any, InferResponse]]
Stream = Callable[[BlockDescription, InferRequest, float], AsyncGenerator[InferResponse, None]]
RunStep = Callable[[BlockDescription, InferRequest, float], Coroutine[Any, Any, Answered]]


@dataclass(slots=True, eq=False)
class _Caller:
    block: BlockDescription
    request: InferRequest
    run: RunStep
    # Never gets an exception: nobody would retrieve it where the caller is cancelled just then.
    future: asyncio.Future[GiveOutcome]
    position: int = 0  # of the step that runs with its request; 0: none does


@dataclass(slots=True, eq=False)
class _Telling:
    """Brings the answers of a stream to its caller, each when the one before was taken, and then the outcome."""

    stream: Stream
    said: asyncio.Queue[InferResponse | GiveOutcome] = field(default_factory=asyncio.Queue)
    was_taken: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, block: BlockDescription, request: InferRequest, deadline: float) -> ManyAnswers:
        kept: list[InferResponse] = []
        size_bytes, is_whole = 0, True
        async with aclosing(self.stream(block, request, deadline)) as answers:
            async for answer in answers:
                size_bytes += answer_bytes(answer)
                is_whole = is_whole and len(kept) < MAX_KEPT_ANSWERS and size_bytes <= MAX_KEPT_BYTES
                if is_whole:
                    kept.append(answer)
                self.was_taken.clear()
                self.said.put_nowait(answer)
                if not answer.is_final:
                    await self.was_taken.wait()
        return ManyAnswers(tuple(kept) if is_whole else (), is_whole)


class SessionRuns:
    """Owns the session table. Used from one event loop."""

    def __init__(self, limits: Limits, stored: StoredSessions | None = None) -> None:
        """`stored`: each step is written down before it runs and when it has."""
        self._stored = stored
        share = limits.session_share
        self._table = SessionTable(
            max_waiting=limits.max_inflight_requests * share,
            max_waiting_bytes=limits.max_inflight_bytes * share,
            lives=secrets.randbits(62),
        )
        self._callers: dict[Ticket, _Caller] = {}
        self._tasks: dict[Step, asyncio.Task[Answered]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._is_closed = False
        self._ancestors: dict[str, dict[str, float]] = {}  # by block: those whose place it took, and when
        self._at_rest: dict[Session, asyncio.Event] = {}  # of sessions that are to be given up when nothing runs

    async def run(
        self, block: BlockDescription, request: InferRequest, deadline: float, run: Run, epoch: int = 0
    ) -> InferResponse:
        """Raises SessionError or Overloaded at once, or what became of the step.

        Callers of one step share one run of it, which goes on when they are cancelled. `epoch` is that of the session's
        owner, where there is a store.
        """
        future: asyncio.Future[GiveOutcome] = asyncio.get_running_loop().create_future()
        ticket = _ticket(block, request, deadline, epoch)
        self._callers[ticket] = _Caller(block, request, run, future)
        try:
            self._perform(self._table.arrive(ticket, now()))
            self._arm()
            given = await future
        finally:
            self._perform(self._table.left(ticket, now()))
            del self._callers[ticket]
        return _answers(given, request)[-1]

    async def stream(
        self, block: BlockDescription, request: InferRequest, deadline: float, stream: Stream, epoch: int = 0
    ) -> AsyncGenerator[InferResponse, None]:
        """The answers to one request of a decoupled model, which are one step together.

        Who sends it again meanwhile gets them when all are there. The step is given up with the caller whose request
        runs: nobody else would take its answers.
        """
        future: asyncio.Future[GiveOutcome] = asyncio.get_running_loop().create_future()
        telling = _Telling(stream)
        future.add_done_callback(lambda done: None if done.cancelled() else telling.said.put_nowait(done.result()))
        ticket = _ticket(block, request, deadline, epoch)
        caller = self._callers[ticket] = _Caller(block, request, telling.run, future)
        try:
            self._perform(self._table.arrive(ticket, now()))
            self._arm()
            while isinstance(said := await telling.said.get(), InferResponse):
                telling.was_taken.set()
                yield replace(said, parameters={**said.parameters, STEP: caller.position})
            if isinstance(said.outcome, PenstockError) or not caller.position:
                for answer in _answers(said, request):
                    yield answer
        finally:
            step = ticket.step
            self._perform(self._table.left(ticket, now()))
            del self._callers[ticket]
            if step is not None and caller.position:
                self._tasks[step].cancel()

    def lost(self, worker: bytes, block_ids: Iterable[str]) -> None:
        """The worker is gone, or holds these blocks no more: sessions whose state was there are lost."""
        self._perform(self._table.lost(worker, block_ids, now()))

    def retire(self, block_id: str, error: PenstockError, heir: BlockDescription | None = None) -> None:
        """The block takes no more: its sessions go on with its heir, or what waits in them fails."""
        if self._stored is not None and heir is not None:
            # They are in the store: who sends the next request takes them from there.
            old = self._ancestors.setdefault(heir.block_id, {})
            old[block_id] = now()
            heir = None
        inherits = None if heir is None else (heir.block_id, heir.settings.sessions)
        self._perform(self._table.retire(block_id, error, inherits, now()))

    def knows(self, block_id: str, session_id: str) -> Session | None:
        return self._table.find(block_id, session_id)

    def known(self) -> list[tuple[str, str]]:
        return self._table.known()

    def disown(self, is_ours: Callable[[str], bool]) -> None:
        """Sessions may belong to other gateways now."""
        self._perform(self._table.disown(is_ours))

    async def give_up(self, block_id: str, session_id: str) -> SessionRecord | None:
        """Another gateway has the session from now on: waits for what runs. None: nothing is known of it."""
        session = self._table.find(block_id, session_id)
        if session is None:
            return None
        if session in self._at_rest:
            raise moved(session)  # who asked first may get it
        at_rest = self._at_rest[session] = asyncio.Event()
        try:
            while True:
                self._perform(self._table.give_up(session))
                if session.running is None:
                    break
                at_rest.clear()
                await at_rest.wait()
        finally:
            del self._at_rest[session]
        if not session.is_known:
            return None
        record = self._table.take(session)
        if self._stored is not None:
            await self._stored.release(block_id, session)
        return record

    def adopt(self, block: BlockDescription, session_id: str, record: SessionRecord, epoch: int = 0) -> None:
        self._table.adopt(block.block_id, block.settings.sessions, session_id, record, epoch, now())

    def ancestors(self, block: BlockDescription) -> list[str]:
        """The blocks whose place it took, as long as their sessions may go on with it."""
        found = self._ancestors.get(block.block_id)
        if not found:
            return []
        since = now() - block.settings.sessions.idle_s
        return [block_id for block_id, at in found.items() if at > since]

    def tick(self) -> None:
        """Forgets idle sessions: call it now and then. Deadlines have a timer of their own."""
        self._perform(self._table.tick(now()))
        self._arm()

    def statistics(self) -> dict[str, int]:
        return {
            "open": self._table.open_sessions(),
            "waiting": self._table.waiting_steps(),
            "repeats": self._table.repeats,
        }

    def drain(self) -> None:
        """No request comes any more: fails those that wait for one that is not there."""
        self._perform(self._table.drain())

    async def close(self) -> None:
        """Fails what waits, and stops what runs."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._perform(self._table.close())
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, GiveOutcome):
                caller = self._callers.get(action.ticket)
                if caller is not None and not caller.future.done():
                    caller.future.set_result(action)
            elif isinstance(action, StartStep):
                self._start(action.step, action.ticket)
            elif isinstance(action, StopStep):
                self._tasks[action.step].cancel()

    def _start(self, step: Step, ticket: Ticket) -> None:
        caller = self._callers[ticket]
        caller.position = step.position
        if self._stored is None:
            run = caller.run(caller.block, caller.request, step.deadline)
        else:
            run = self._run_stored(self._stored, step, caller)
        task = asyncio.get_running_loop().create_task(run)
        self._tasks[step] = task
        # Not in the task itself: a task that is cancelled before its first step runs nothing of it.
        task.add_done_callback(partial(self._finished, step))

    async def _run_stored(self, stored: StoredSessions, step: Step, caller: _Caller) -> Answered:
        block_id = caller.block.block_id
        await stored.begin(block_id, step)
        try:
            answered = await caller.run(caller.block, caller.request, step.deadline)
        except PenstockError as error:
            if is_conclusive(error):
                await stored.end(block_id, step, error)
            raise
        await stored.end(block_id, step, answered)
        return answered

    def _finished(self, step: Step, task: asyncio.Task[Answered]) -> None:
        del self._tasks[step]
        outcome = self._outcome(task)
        session = step.session
        self._perform(self._table.done(step, outcome, now()))
        if isinstance(outcome, SessionMoved) and session.is_known and session.running is None:
            # The store says so: what is known here is of no use, and who comes next takes the session anew.
            self._perform(self._table.give_up(session))
            self._table.take(session)
        if session.running is None and (at_rest := self._at_rest.get(session)) is not None:
            at_rest.set()

    def _outcome(self, task: asyncio.Task[Answered]) -> Outcome:
        if task.cancelled():
            if self._is_closed:
                return draining()
            return Overloaded("the request was given up, for its caller had left; send it again")
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, PenstockError):
            return error
        log.error("session_step_failed", exc_info=error)
        return InternalError("the request failed in a way that nobody expected; the server's log tells more")

    def _arm(self) -> None:
        due = self._table.due()
        if due is None or self._is_closed or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(max(SHORTEST_S, due - now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.tick()


def _ticket(block: BlockDescription, request: InferRequest, deadline: float, epoch: int) -> Ticket:
    asked = request.controls.session
    assert asked is not None, "the request has no session"
    ticket = Ticket(block.block_id, block.settings.sessions, asked, deadline, request.size_bytes, epoch=epoch)
    if asked.is_start and asked.seq_no is not None:
        ticket.digest = _digest(request)
    return ticket


def _answers(given: GiveOutcome, request: InferRequest) -> list[InferResponse]:
    """Copies for this caller: edges change what they get, and others may get the same outcome."""
    outcome = given.outcome
    if isinstance(outcome, PenstockError):
        raise copy(outcome)
    told: dict[str, Parameter] = {STEP: given.position}
    if given.is_repeat:
        told[REPEAT] = True
    found = [
        replace(
            answer,
            model=request.model,
            request_id=request.request_id,
            parameters={**answer.parameters, **told},
            timing=Timing() if given.is_repeat else answer.timing,
        )
        for answer in answers_of(outcome)
    ]
    if not found:
        raise SessionError("the request was answered, with more than is kept to be given again (sessions.answers)")
    return found


def _digest(request: InferRequest) -> bytes:
    found = blake2b(digest_size=16)
    for tensor in request.inputs:
        found.update(f"{tensor.name}\0{tensor.datatype}\0{tensor.shape}\0{len(tensor.data)}\0".encode())
        found.update(tensor.data)
    return found.digest()
