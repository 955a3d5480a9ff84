"""What a block with a model's own code keeps for its jobs: their contexts, their sessions and their answers.

All state is owned by the event loop. What the model must hear is said in its instances' threads.
"""

import asyncio
import time
from collections.abc import Callable

from penstock.core.errors import InvalidRequest
from penstock.core.settings import BlockSettings
from penstock.engines.base import CallContext
from penstock.worker.job import WorkerJob
from penstock.worker.running.alarm import Alarm
from penstock.worker.running.answer_credits import AnswerCredits
from penstock.worker.running.calls import IDLE, LEAVES, CallExecution
from penstock.worker.running.instances import InstanceThreads
from penstock.worker.running.sessions import BlockSessions

now = time.monotonic
IDLE_EVERY_S = 0.001  # sessions that become idle within this time are ended together


class Contexts:
    def __init__(
        self,
        settings: BlockSettings,
        execution: CallExecution,
        instances: InstanceThreads,
        expire: Callable[[WorkerJob], None],
    ) -> None:
        """`expire` is called when the deadline of a decoupled job passes, however far it is."""
        self._is_decoupled = settings.is_decoupled
        self._execution = execution
        self._instances = instances
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._sessions = BlockSessions(settings.sessions.idle_s)
        self._idle = Alarm(self._end_idle, IDLE_EVERY_S)

    def enter(self, job: WorkerJob) -> None:
        """A job has come. Raises InvalidRequest, and expects `leave` then, too."""
        if job.session is not None:
            self._sessions.enter(job.session.session_id)
        if self._is_decoupled:
            if job.response_credits == 0:
                raise InvalidRequest(
                    "this model gives any number of answers to one request: ask it through a stream "
                    "(ModelStreamInfer, or a WebSocket)"
                )
            expiry = self._loop.call_later(max(0.0, job.deadline - now()), self._expire, job)
            job.answers = AnswerCredits(job.response_credits, expiry)

    def start(self, job: WorkerJob) -> None:
        """The job goes to the model."""
        step, parameters = job.session, job.request.parameters
        if step is None:
            job.context = CallContext(job.request_id, parameters)
            return
        start = self._sessions.start(step)
        job.is_anew = start.is_anew
        job.context = CallContext(
            job.request_id, parameters, step.session_id, step.seq_no or 0, start.is_new, step.is_end
        )

    def ended(self, session_id: str) -> None:
        self._sessions.end(session_id)

    def leave(self, job: WorkerJob) -> None:
        """The job is answered or gone."""
        if job.answers is not None:
            job.answers.close()
        if job.session is not None:
            self._sessions.leave(job.session.session_id, now())
            self._idle.set(self._sessions.next_due())

    async def end_all(self) -> None:
        """The block is let go: returns when the model knows that its sessions are over."""
        if over := self._sessions.clear():
            told = asyncio.Event()
            self._tell(over, LEAVES, lambda problem: told.set())
            await told.wait()

    def close(self) -> None:
        self._idle.cancel()
        if over := self._sessions.clear():
            self._tell(over, LEAVES, lambda problem: None)

    def _end_idle(self) -> None:
        if over := self._sessions.expire(now()):
            self._tell(over, IDLE, lambda problem: None)
        self._idle.set(self._sessions.next_due())

    def _tell(self, session_ids: list[str], reason: str, done: Callable[[str], None]) -> None:
        def tell(instance: int) -> str:
            self._execution.end_sessions(session_ids, reason)
            return ""

        self._instances.ask(tell, done)
