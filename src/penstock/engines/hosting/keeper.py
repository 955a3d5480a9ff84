"""One instance of a model that runs in processes: keeps one running, and starts another when it ends."""

import contextvars
import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import structlog

from penstock.core.backoff import Backoff
from penstock.core.errors import EngineFailed, PenstockError

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0
PATIENCE_S = 5.0  # how long a request waits for a process that is being started
KILL_S = 5.0

log = structlog.get_logger()
now = time.monotonic


class KeptProcess(Protocol):
    """What it is to an engine is the engine's affair. Its keeper's thread makes it, loads it and waits for its end."""

    end: str  # how it ended; empty while it runs
    pid: int

    def load(self, timeout_s: float) -> None:
        """Raises PenstockError where it cannot."""
        ...

    def problem(self) -> str: ...

    def memory_mib(self) -> int: ...

    def stop(self) -> None:
        """Asks it to leave; where it cannot hear that, it is killed, with what it started."""
        ...

    def kill(self) -> None: ...

    def wait_end(self) -> None: ...

    def release(self) -> None: ...


P = TypeVar("P", bound=KeptProcess)


class ProcessKeeper(Generic[P]):
    """A thread of its own makes the processes, as they end with the thread that made them."""

    def __init__(self, make: Callable[[], P], labels: Mapping[str, str | int], load_s: float) -> None:
        self._make = make
        self._labels = labels
        self._load_s = load_s
        self._changed = threading.Condition()
        # Below: changed by the keeper, under the condition.
        self._process: P | None = None  # loaded
        self._loading: P | None = None
        self._problem = ""  # why there is none
        self._restart_at = 0.0
        self._is_closing = False
        self._keeper = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._keep,),
            name=f"{labels['model']}-{labels['instance']}-keeper",
            daemon=True,
        )

    def start(self) -> None:
        self._keeper.start()

    def wait_loaded(self, deadline: float) -> str:
        """Returns what went wrong; empty once the first process has loaded the model."""
        with self._changed:
            self._changed.wait_for(lambda: self._process or self._problem, max(0.0, deadline - now()))
            if self._process is None:
                return self._problem or "its process was not ready in time"
            return ""

    def process(self) -> P:
        """A process that has loaded the model; waits a little while it is being started again."""
        process = self._process
        if process is not None and not process.end:
            return process
        deadline = now() + PATIENCE_S
        with self._changed:
            while self._process is None or self._process.end:
                if self._is_closing:
                    raise EngineFailed("the model is being unloaded; nothing was run")
                if self._restart_at > deadline or not self._changed.wait(deadline - now()):
                    raise EngineFailed(
                        f"the model's process is down and is being started again; nothing was run. It ended with: "
                        f"{self._problem}"
                    )
            return self._process

    def problem(self) -> str:
        process = self._process
        if process is None:
            return self._problem or "the model's process is being started"
        return process.problem()

    def ask_to_stop(self) -> None:
        with self._changed:
            self._is_closing = True
            process, loading = self._process, self._loading
            self._changed.notify_all()
        if loading is not None:
            loading.kill()
        if process is not None:
            process.stop()

    def end(self, deadline: float) -> None:
        """Call it after `ask_to_stop`. Returns when the process is gone."""
        if self._keeper.ident is None:  # never started
            return
        self._keeper.join(max(0.0, deadline - now()))
        if self._keeper.is_alive():
            process = self._process or self._loading
            if process is not None:
                log.warning("model_process_killed", **self._labels)
                process.kill()
            self._keeper.join(KILL_S)

    # --- the keeper's thread

    def _keep(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            started = now()
            is_first = self._restart_at == 0.0
            was_loaded, problem = self._live()
            wait_s = backoff.died(now() - started if was_loaded else 0.0)
            with self._changed:
                self._problem = problem
                self._restart_at = now() + wait_s
                self._changed.notify_all()
                # What never loaded is not tried again: whoever loads it is told.
                if self._is_closing or (is_first and not was_loaded):
                    return
            log.error("model_process_ended", reason=problem, restart_in_s=round(wait_s, 2), **self._labels)
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closing, wait_s):
                    return

    def _live(self) -> tuple[bool, str]:
        """Runs a process to its end. Returns whether it loaded the model, and how it ended."""
        try:
            process = self._make()
        except (OSError, RuntimeError) as error:  # no memory, no file descriptors, no threads
            return False, f"its process cannot be started: {error}"
        try:
            problem = self._load(process)
            if problem:
                process.kill()
            process.wait_end()
        finally:
            with self._changed:
                self._process = self._loading = None
            process.release()
        return not problem, problem or process.end

    def _load(self, process: P) -> str:
        with self._changed:
            if self._is_closing:
                return "the model is being unloaded"
            self._loading = process
        try:
            process.load(self._load_s)
        except PenstockError as error:
            return error.message
        with self._changed:
            self._process, self._loading = process, None
            self._changed.notify_all()
        log.info("model_process_started", pid=process.pid, memory_mb=process.memory_mib(), **self._labels)
        return ""
