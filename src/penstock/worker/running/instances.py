"""A block's instances: a thread each, which take batches and errands from one inbox.

Threads only compute: what becomes of a batch or an errand is handed to the event loop.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import EngineFailed, PenstockError, message_of, without_trace
from penstock.core.tensors import Array
from penstock.worker.running.batcher import Batch


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


class Execution(Protocol):
    """Called in an instance's thread."""

    def run(self, instance: int, batch: Batch) -> BatchOutcome:
        """Never raises: what goes wrong is the result of the pieces that it went wrong for."""
        ...

    def probe(self, instance: int) -> str:
        """Whether the model still works. Empty, or what is wrong."""
        ...


Errand = Callable[[int], str]  # with the instance's number; gives what is wrong, or nothing


class InstanceThreads:
    def __init__(
        self, name: str, count: int, execute: Callable[[int, Batch], BatchOutcome], ran: Callable[[BatchOutcome], None]
    ) -> None:
        """`execute` is called in a thread and never raises; `ran` on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._execute = execute
        self._ran = ran
        # One for all instances, so that what is handed out ahead goes to whichever is idle first. The runner puts in
        # at most one batch more than there are instances.
        self._inbox: queue.SimpleQueue[Batch | tuple[Errand, Callable[[str], None]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, batch: Batch) -> None:
        self._inbox.put(batch)

    def ask(self, errand: Errand, done: Callable[[str], None]) -> None:
        """Has an instance run the errand after what it was given before; `done` hears, on the loop, what went wrong."""
        self._inbox.put((errand, done))

    def close(self, then: Callable[[], None], patience_s: float | None = None) -> asyncio.Event:
        """Threads leave when they have done what they were given; `then` is called, in a thread, after the last.

        `patience_s`: what they get for it; None: as long as they take. The event is set after all of this.
        """
        for _ in self._threads:
            self._inbox.put(None)
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
        while (work := self._inbox.get()) is not None:
            if isinstance(work, Batch):
                is_heard = self._tell(self._ran, self._execute(instance, work))
            else:
                errand, done = work
                is_heard = self._tell(done, _problem(errand, instance))
                del errand, done
            del work  # it would be kept until the next comes
            if not is_heard:
                return

    def _tell(self, callback: Callable[..., None], *what: BatchOutcome | str) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, *what)
        except RuntimeError:  # the loop has closed: the process is leaving
            return False
        return True


def _problem(errand: Errand, instance: int) -> str:
    try:
        return errand(instance)
    except Exception as error:  # noqa: BLE001 - it is what the errand was to find out
        return message_of(error)


def as_engine_failure(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return without_trace(error)
    return EngineFailed(f"the model failed on this input: {type(error).__name__}: {error}")
