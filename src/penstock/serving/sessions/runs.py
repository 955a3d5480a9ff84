"""The shell around the session table: runs its steps, each in a task of its own, and hands callers their outcomes."""

import asyncio
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
from penstock.core.errors import InternalError, Overloaded, PenstockError
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.serving.sessions.answers import Outcome
from penstock.serving.sessions.faults import draining
from penstock.serving.sessions.parts import Action, GiveOutcome, StartStep, Step, StopStep, Ticket
from penstock.serving.sessions.table import SessionTable

log = structlog.get_logger()
now = time.monotonic
STEP, REPEAT = "session_step", "session_repeat"  # parameters of answers
SHORTEST_S = 0.001  # a timer may fire a little early: it must not be set again for no time at all

Run = Callable[[BlockDescription, InferRequest, float], Coroutine[Any, Any, InferResponse]]


@dataclass(slots=True, eq=False)
class _Caller:
    block: BlockDescription
    request: InferRequest
    run: Run
    # Never gets an exception: nobody would retrieve it where the caller is cancelled just then.
    future: asyncio.Future[GiveOutcome]


class SessionRuns:
    """Owns the session table. Used from one event loop."""

    def __init__(self, limits: Limits) -> None:
        share = limits.session_share
        self._table = SessionTable(
            max_waiting=limits.max_inflight_requests * share, max_waiting_bytes=limits.max_inflight_bytes * share
        )
        self._callers: dict[Ticket, _Caller] = {}
        self._tasks: dict[Step, asyncio.Task[InferResponse]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._is_closed = False

    async def run(self, block: BlockDescription, request: InferRequest, deadline: float, run: Run) -> InferResponse:
        """Raises SessionError or Overloaded at once, or what became of the step.

        Callers of one step share one run of it, which goes on when they are cancelled.
        """
        asked = request.controls.session
        assert asked is not None, "the request has no session"
        ticket = Ticket(block.block_id, block.settings.sessions, asked, deadline, request.size_bytes)
        if asked.is_start and asked.seq_no is not None:
            ticket.digest = _digest(request)
        future: asyncio.Future[GiveOutcome] = asyncio.get_running_loop().create_future()
        self._callers[ticket] = _Caller(block, request, run, future)
        try:
            self._perform(self._table.arrive(ticket, now()))
            self._arm()
            given = await future
        finally:
            self._perform(self._table.left(ticket, now()))
            del self._callers[ticket]
        return _answer(given, request)

    def lost(self, worker: bytes, block_ids: Iterable[str]) -> None:
        """The worker is gone, or holds these blocks no more: sessions whose state was there are lost."""
        self._perform(self._table.lost(worker, block_ids, now()))

    def retire(self, block_id: str, error: PenstockError, heir: BlockDescription | None = None) -> None:
        """The block takes no more: its sessions go on with its heir, or what waits in them fails."""
        inherits = None if heir is None else (heir.block_id, heir.settings.sessions)
        self._perform(self._table.retire(block_id, error, inherits, now()))

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
        task = asyncio.get_running_loop().create_task(caller.run(caller.block, caller.request, step.deadline))
        self._tasks[step] = task
        # Not in the task itself: a task that is cancelled before its first step runs nothing of it.
        task.add_done_callback(partial(self._finished, step))

    def _finished(self, step: Step, task: asyncio.Task[InferResponse]) -> None:
        del self._tasks[step]
        self._perform(self._table.done(step, self._outcome(task), now()))

    def _outcome(self, task: asyncio.Task[InferResponse]) -> Outcome:
        if task.cancelled():
            if self._is_closed:
                return draining()
            return Overloaded("the request was given up, for too many ran whose callers had left; send it again")
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


def _answer(given: GiveOutcome, request: InferRequest) -> InferResponse:
    """A copy for this caller: edges change what they get, and others may get the same outcome."""
    outcome = given.outcome
    if isinstance(outcome, PenstockError):
        raise copy(outcome)
    parameters = {**outcome.parameters, STEP: given.position}
    if not given.is_repeat:
        return replace(outcome, request_id=request.request_id, parameters=parameters)
    parameters[REPEAT] = True
    return replace(outcome, request_id=request.request_id, parameters=parameters, timing=Timing())


def _digest(request: InferRequest) -> bytes:
    found = blake2b(digest_size=16)
    for tensor in request.inputs:
        found.update(f"{tensor.name}\0{tensor.datatype}\0{tensor.shape}\0{len(tensor.data)}\0".encode())
        found.update(tensor.data)
    return found.digest()
