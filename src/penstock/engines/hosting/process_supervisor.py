"""Keeps the process of a model's instance running: starts a new process when the old one ends."""

import contextvars
import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import structlog

from penstock.core.errors import EngineFailed, PenstockError
from penstock.telemetry.backoff import Backoff

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0
RESTART_WAIT_S = 5.0  # longest wait of a request for a process that is restarting
KILL_S = 5.0

log = structlog.get_logger()
now = time.monotonic


class SupervisedProcess(Protocol):
    """The methods that the supervisor calls on a process. The supervisor's thread starts it and waits for its end."""

    end: str  # how the process ended; empty while it runs
    pid: int

    def load(self, timeout_s: float) -> None:
        """Load the model; raise PenstockError if that fails."""
        ...

    def problem(self) -> str: ...

    def memory_mib(self) -> int: ...

    def stop(self) -> None:
        """Ask the process to end; if it cannot read this message now, kill the process and its children."""
        ...

    def kill(self) -> None: ...

    def wait_end(self) -> None: ...

    def release(self) -> None: ...


P = TypeVar("P", bound=SupervisedProcess)


class ProcessSupervisor(Generic[P]):
    """Starts processes in a thread of its own, because a process ends together with the thread that started it."""

    def __init__(self, create: Callable[[], P], labels: Mapping[str, str | int], load_s: float) -> None:
        self._create = create
        self._labels = labels
        self._load_s = load_s
        self._changed = threading.Condition()
        # Below: changed by the supervisor's thread, under the condition.
        self._process: P | None = None  # None unless the process has loaded the model
        self._loading: P | None = None
        self._problem = ""  # why the last process ended or could not be started
        self._restart_at = 0.0
        self._is_closing = False
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._keep_running,),
            name=f"{labels['model']}-{labels['instance']}-supervisor",
            daemon=True,
        )

    def start(self) -> None:
        self._thread.start()

    def wait_loaded(self, deadline: float) -> str:
        """Wait until the first process has loaded the model; return an empty text, or why the load failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._process or self._problem, max(0.0, deadline - now()))
            if self._process is None:
                return self._problem or "the model's process was not ready in time"
            return ""

    def process(self) -> P:
        """Return a process that has loaded the model; wait up to RESTART_WAIT_S while the process restarts."""
        process = self._process
        if process is not None and not process.end:
            return process
        deadline = now() + RESTART_WAIT_S
        with self._changed:
            while self._process is None or self._process.end:
                if self._is_closing:
                    raise EngineFailed("the model is being unloaded; the request did not run")
                if self._restart_at > deadline or not self._changed.wait(deadline - now()):
                    raise EngineFailed(
                        f"the model's process has ended and is being restarted; the request did not run. "
                        f"The process ended with: {self._problem}"
                    )
            return self._process

    def problem(self) -> str:
        process = self._process
        if process is None:
            return self._problem or "the model's process is being started"
        return process.problem()

    def request_stop(self) -> None:
        with self._changed:
            self._is_closing = True
            process, loading = self._process, self._loading
            self._changed.notify_all()
        if loading is not None:
            loading.kill()
        if process is not None:
            process.stop()

    def end(self, deadline: float) -> None:
        """Wait until the process has ended; kill the process at the deadline. Call `request_stop` first."""
        if self._thread.ident is None:  # never started
            return
        self._thread.join(max(0.0, deadline - now()))
        if self._thread.is_alive():
            process = self._process or self._loading
            if process is not None:
                log.warning("model_process_killed", **self._labels)
                process.kill()
            self._thread.join(KILL_S)

    # --- the supervisor's thread

    def _keep_running(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            started = now()
            is_first = self._restart_at == 0.0
            was_loaded, problem = self._run_process()
            wait_s = backoff.compute_next_wait_s(now() - started if was_loaded else 0.0)
            with self._changed:
                self._problem = problem
                self._restart_at = now() + wait_s
                self._changed.notify_all()
                # A model that never loaded is not retried: `wait_loaded` returns the problem.
                if self._is_closing or (is_first and not was_loaded):
                    return
            log.error("model_process_ended", reason=problem, restart_in_s=round(wait_s, 2), **self._labels)
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closing, wait_s):
                    return

    def _run_process(self) -> tuple[bool, str]:
        """Start a process and wait for its end; return whether it loaded the model, and how it ended."""
        try:
            process = self._create()
        except (OSError, RuntimeError) as error:  # memory, file descriptors or threads are used up
            return False, f"the model's process cannot be started: {error}"
        try:
            problem = self._load_model(process)
            if problem:
                process.kill()
            process.wait_end()
        finally:
            with self._changed:
                self._process = self._loading = None
            process.release()
        return not problem, problem or process.end

    def _load_model(self, process: P) -> str:
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
