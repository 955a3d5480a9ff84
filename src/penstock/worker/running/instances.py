"""A block's instances: one thread each, which runs batches and short calls ("errands"), such as a health check.

Threads only compute: the outcome is passed to the event loop.
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
from functools import partial
from math import inf
from typing import Protocol

from penstock.core.errors import EngineFailed, PenstockError, get_message, remove_trace
from penstock.core.tensors import Array
from penstock.worker.running.batcher import Batch
from penstock.worker.running.cores import Cores


@dataclass(slots=True)
class BatchOutcome:
    """The results of a batch, and the time of each of its phases."""

    instance: int
    batch: Batch
    results: list[Sequence[Array] | PenstockError]
    started: float = 0.0  # by the monotonic clock
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    cpu_ns: int = 0  # CPU time of the thread that ran the batch, without waiting for the interpreter or a core
    ended: str = ""  # the session that it ended, if any

    @property
    def took_ns(self) -> int:
        return self.input_ns + self.infer_ns + self.output_ns


class Execution(Protocol):
    """Runs batches and probes in the threads of instances."""

    def run(self, instance: int, batch: Batch) -> BatchOutcome:
        """Run a batch. This method never raises: an error becomes the result of the pieces that it affects."""
        ...

    def probe(self, instance: int) -> str:
        """Return why the model does not work, or an empty text if it works."""
        ...


Errand = Callable[[int], str]  # takes the instance's number; returns the problem or an empty text
Work = Batch | tuple[Errand, Callable[[str], None]]


class InstanceThreads:
    """Runs a block's work in one thread per instance; work waits in a queue for an idle thread."""

    def __init__(
        self,
        name: str,
        count: int,
        execute: Callable[[int, Batch], BatchOutcome],
        on_batch_done: Callable[[BatchOutcome], None],
        cores: Cores | None = None,
    ) -> None:
        """`execute` runs a batch in a thread and never raises; `on_batch_done` is called on the event loop.

        `cores` assigns a core to each busy instance; None: instances run on any core.
        """
        self._loop = asyncio.get_running_loop()
        self._execute = execute
        self._on_batch_done = on_batch_done
        # One inbox per instance: with a shared inbox, a thread that takes work would wake other threads in vain.
        self._inboxes: list[queue.SimpleQueue[Work | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._cores = cores
        self._core_of: list[int | None] = [
            None
        ] * count  # written by the loop, and read by the instance before each batch
        self._woken_at = [inf] * count  # monotonic time, or infinity if the instance was busy when it took the work
        self._idle = list(range(count))  # owned by the loop; the end was busy last, and its core's caches are warm
        # Work for the instance that is idle first. The runner hands out at most one batch more than there are
        # instances.
        self._ahead: deque[Work] = deque()
        self._is_closing = False  # the last thread to end runs the remaining work
        self._threads = [
            threading.Thread(target=self._run_thread, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, batch: Batch) -> None:
        self._hand_out(batch)

    def run_errand(self, errand: Errand, done: Callable[[str], None]) -> None:
        """Run a short call (errand) in any instance, after the work that was handed out before.

        Call `done` on the loop with the problem or an empty text.
        """
        self._hand_out((errand, done))

    def _hand_out(self, work: Work) -> None:
        if self._idle:
            instance = self._idle.pop()
            if self._cores is not None:
                self._core_of[instance] = self._cores.acquire()
                self._woken_at[instance] = time.monotonic()
            self._inboxes[instance].put(work)
        else:
            self._ahead.append(work)

    def _on_work_done(
        self, instance: int, is_idle: bool, callback: Callable[..., None], outcome: BatchOutcome | str
    ) -> None:
        if self._cores is not None and (core := self._core_of[instance]) is not None:
            if isinstance(outcome, BatchOutcome):
                waited_s = max(0.0, outcome.started - self._woken_at[instance])
                self._woken_at[instance] = inf
                self._cores.record(int(waited_s * 1e9) + outcome.took_ns, outcome.cpu_ns)
            if is_idle or self._cores.is_suspended:
                self._cores.release(core)
                self._core_of[instance] = None
        if is_idle:
            self._idle.append(instance)
            # Work arrived after the instance had looked for it.
            if not self._is_closing and (work := self._pop_ahead()) is not None:
                self._hand_out(work)
        callback(outcome)

    def close(self, on_ended: Callable[[], None], patience_s: float | None = None) -> asyncio.Event:
        """End the threads when their work is done, call `on_ended` in a thread, and set the returned event.

        `patience_s`: the longest time to wait for the threads; None means no limit.
        """
        self._is_closing = True
        for inbox in self._inboxes:
            inbox.put(None)
        return close_in_thread(partial(self._join_threads, on_ended, patience_s))

    def _join_threads(self, on_ended: Callable[[], None], patience_s: float | None) -> None:
        end = None if patience_s is None else time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        on_ended()

    def _run_thread(self, instance: int) -> None:
        inbox = self._inboxes[instance]
        kept: int | None = None
        work = inbox.get()
        while work is not None:
            if (core := self._core_of[instance]) != kept:
                kept = _bind_to_core(core)
            done = self._perform_work(instance, work)
            work = self._pop_ahead()
            is_delivered = self._call_on_loop(self._on_work_done, instance, work is None, *done)
            del done  # free the outcome now, before waiting for the next work
            if not is_delivered:
                return
            if work is None:
                work = inbox.get()
        while (work := self._pop_ahead()) is not None:  # work that was handed out before `close`
            self._call_on_loop(*self._perform_work(instance, work))

    def _perform_work(self, instance: int, work: Work) -> tuple[Callable[..., None], BatchOutcome | str]:
        """Run the work; return the callback for the outcome, and the outcome."""
        if isinstance(work, Batch):
            return self._on_batch_done, self._execute(instance, work)
        errand, done = work
        return done, _run_errand(errand, instance)

    def _pop_ahead(self) -> Work | None:
        try:
            return self._ahead.popleft()
        except IndexError:
            return None

    def _call_on_loop(self, callback: Callable[..., None], *arguments: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop has closed: the process is ending
            return False
        return True


def close_in_thread(close: Callable[[], None]) -> asyncio.Event:
    """Call `close` in a thread, and set the returned event on the event loop when `close` has returned."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            close()
        finally:
            with suppress(RuntimeError):  # the loop has closed: the process is ending
                loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=run, name="closing", daemon=True).start()
    return closed


def _bind_to_core(core: int | None) -> int | None:
    """Bind the calling thread to `core`, and return `core`.

    If `core` is None, or if the thread may not be bound, let the thread run on all cores, and return None.
    """
    if core is not None:
        with suppress(OSError):
            os.sched_setaffinity(0, {core})
            return core
    with suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
    return None


def _run_errand(errand: Errand, instance: int) -> str:
    try:
        return errand(instance)
    except Exception as error:  # noqa: BLE001 - an exception is a problem, too
        return get_message(error)


def as_engine_failure(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return remove_trace(error)
    return EngineFailed(f"the model failed on this input: {type(error).__name__}: {error}")
