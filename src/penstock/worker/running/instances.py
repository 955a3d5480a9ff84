"""A block's instances: a thread each, which is handed batches and errands.

Threads only compute: what becomes of a batch or an errand is handed to the event loop.
"""

import asyncio
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Protocol

from penstock.core.errors import EngineFailed, PenstockError, message_of, without_trace
from penstock.core.tensors import Array
from penstock.worker.running.batcher import Batch
from penstock.worker.running.cores import Cores


@dataclass(slots=True)
class BatchOutcome:
    """What became of a batch, and where its time went."""

    instance: int
    batch: Batch
    results: list[Sequence[Array] | PenstockError]
    started: float = 0.0  # of the monotonic clock
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    cpu_ns: int = 0  # of the thread that ran it: waiting for the interpreter, or for a core, is not in it
    ended: str = ""  # the session that it ended; empty: none

    @property
    def took_ns(self) -> int:
        return self.input_ns + self.infer_ns + self.output_ns


class Execution(Protocol):
    """Called in an instance's thread."""

    def run(self, instance: int, batch: Batch) -> BatchOutcome:
        """Never raises: what goes wrong is the result of the pieces that it went wrong for."""
        ...

    def probe(self, instance: int) -> str:
        """Whether the model still works. Empty, or what is wrong."""
        ...


Errand = Callable[[int], str]  # with the instance's number; gives what is wrong, or nothing
Work = Batch | tuple[Errand, Callable[[str], None]]


class InstanceThreads:
    def __init__(
        self,
        name: str,
        count: int,
        execute: Callable[[int, Batch], BatchOutcome],
        ran: Callable[[BatchOutcome], None],
        cores: Cores | None = None,
    ) -> None:
        """`execute` is called in a thread and never raises; `ran` on the event loop.

        `cores` are of all who compute in the threads of their instances; None: these do not.
        """
        self._loop = asyncio.get_running_loop()
        self._execute = execute
        self._ran = ran
        # Each has its own: where all wait at one, whoever takes something wakes another that finds nothing.
        self._inboxes: list[queue.SimpleQueue[Work | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._cores = cores
        self._core_of: list[int | None] = [None] * count  # set by the loop; the instance looks before each batch
        self._woken_at = [inf] * count  # of the monotonic clock; inf: it was busy when it took what it runs
        self._idle = list(range(count))  # the loop's; who was busy last is first, as its core's caches know it
        # For whichever is idle first. The runner puts in at most one batch more than there are instances.
        self._ahead: deque[Work] = deque()
        self._is_closing = False  # whoever leaves last does what is left
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, batch: Batch) -> None:
        self._hand_out(batch)

    def ask(self, errand: Errand, done: Callable[[str], None]) -> None:
        """Has an instance run the errand after what it was given before; `done` hears, on the loop, what went wrong."""
        self._hand_out((errand, done))

    def _hand_out(self, work: Work) -> None:
        if self._idle:
            instance = self._idle.pop()
            if self._cores is not None:
                self._core_of[instance] = self._cores.take()
                self._woken_at[instance] = time.monotonic()
            self._inboxes[instance].put(work)
        else:
            self._ahead.append(work)

    def _settled(
        self, instance: int, is_idle: bool, callback: Callable[..., None], outcome: BatchOutcome | str
    ) -> None:
        if self._cores is not None and (core := self._core_of[instance]) is not None:
            if isinstance(outcome, BatchOutcome):
                waited_s = max(0.0, outcome.started - self._woken_at[instance])
                self._woken_at[instance] = inf
                self._cores.note(int(waited_s * 1e9) + outcome.took_ns, outcome.cpu_ns)
            if is_idle or self._cores.are_left:
                self._cores.give_back(core)
                self._core_of[instance] = None
        if is_idle:
            self._idle.append(instance)
            # It came when the instance had already looked for it.
            if not self._is_closing and (work := self._take_ahead()) is not None:
                self._hand_out(work)
        callback(outcome)

    def close(self, then: Callable[[], None], patience_s: float | None = None) -> asyncio.Event:
        """Threads leave when they have done what they were given; `then` is called, in a thread, after the last.

        `patience_s`: what they get for it; None: as long as they take. The event is set after all of this.
        """
        self._is_closing = True
        for inbox in self._inboxes:
            inbox.put(None)
        closed = asyncio.Event()
        threading.Thread(target=self._end, args=(then, patience_s, closed), name="closing", daemon=True).start()
        return closed

    def _end(self, then: Callable[[], None], patience_s: float | None, closed: asyncio.Event) -> None:
        end = None if patience_s is None else time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        try:
            then()
        finally:
            self._tell(closed.set)

    def _run(self, instance: int) -> None:
        inbox = self._inboxes[instance]
        kept: int | None = None
        work = inbox.get()
        while work is not None:
            if (core := self._core_of[instance]) != kept:
                kept = _keep_to(core)
            done = self._perform(instance, work)
            work = self._take_ahead()
            is_heard = self._tell(self._settled, instance, work is None, *done)
            del done  # it would be kept until the next comes
            if not is_heard:
                return
            if work is None:
                work = inbox.get()
        while (work := self._take_ahead()) is not None:  # it was given before the end
            self._tell(*self._perform(instance, work))

    def _perform(self, instance: int, work: Work) -> tuple[Callable[..., None], BatchOutcome | str]:
        """Who is to hear, and what."""
        if isinstance(work, Batch):
            return self._ran, self._execute(instance, work)
        errand, done = work
        return done, _problem(errand, instance)

    def _take_ahead(self) -> Work | None:
        try:
            return self._ahead.popleft()
        except IndexError:
            return None

    def _tell(self, callback: Callable[..., None], *what: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, *what)
        except RuntimeError:  # the loop has closed: the process is leaving
            return False
        return True


def _keep_to(core: int | None) -> int | None:
    """The calling thread runs there alone; None: wherever its process may. So it does where the core was taken away, or
    where threads may not be bound."""
    if core is not None:
        with suppress(OSError):
            os.sched_setaffinity(0, {core})
            return core
    with suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
    return None


def _problem(errand: Errand, instance: int) -> str:
    try:
        return errand(instance)
    except Exception as error:  # noqa: BLE001 - it is what the errand was to find out
        return message_of(error)


def as_engine_failure(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return without_trace(error)
    return EngineFailed(f"the model failed on this input: {type(error).__name__}: {error}")
