"""The load generator: several processes that send load to one target."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from penstock.core.errors import InternalError, Unavailable
from penstock.experiments.load.load_process import LoadSpec, Window, WindowOutcome, make_command_line, merge_outcomes
from penstock.experiments.processes import ChildProcess

OFFSET = 1_009  # distance in messages between the first messages of two processes
HEAD_START_S = 0.05  # time from the command to the first request, so that all processes start together


class Generator(ExitStack):
    """A context manager that divides a load among several processes; a load of one caller uses one process."""

    def __init__(self, spec: LoadSpec, processes: int = 1) -> None:
        super().__init__()
        share = replace(spec, connections=max(1, -(-spec.connections // processes)))
        self._processes: list[_LoadProcess] = []
        try:
            for index in range(processes):
                process_spec = replace(share, first=spec.first + index * OFFSET)
                self._processes.append(self.enter_context(_LoadProcess(process_spec)))
            for process in self._processes:
                if reason := process.answer().get("failed"):
                    raise Unavailable(f"{spec.target}: {reason}: is a server running there?")
        except BaseException:
            self.close()
            raise

    def run(self, window: Window) -> WindowOutcome:
        """Measure one window. The counts of sent requests and of CPU seconds include the warm-up."""
        (outcome,), totals = self._run(replace(window, most=1), lambda outcomes: True)
        outcome.sent, outcome.cpu_s = totals
        return outcome

    def run_until(
        self, window: Window, has_enough_windows: Callable[[Sequence[WindowOutcome]], bool]
    ) -> list[WindowOutcome]:
        """Measure windows under one continuous load until `has_enough_windows` returns True, at most `window.most`."""
        return self._run(window, has_enough_windows)[0]

    def _run(
        self, window: Window, has_enough_windows: Callable[[Sequence[WindowOutcome]], bool]
    ) -> tuple[list[WindowOutcome], tuple[int, float]]:
        start_at = time.monotonic() + HEAD_START_S
        active = self._processes if window.rate else self._processes[: window.concurrency]
        callers, rest = divmod(window.concurrency, len(active))
        share = replace(window, rate=window.rate / len(active), start_at=start_at)
        for index, process in enumerate(active):
            process.send(asdict(replace(share, concurrency=callers + (index < rest))))
        outcomes: list[WindowOutcome] = []
        while len(outcomes) < window.most:
            outcomes.append(merge_outcomes([WindowOutcome.from_json(process.answer()) for process in active]))
            if has_enough_windows(outcomes):
                break
        for process in active:
            process.send({"stop": True})
        ends = [process.last() for process in active]
        return outcomes, (sum(end["sent"] for end in ends), sum(end["cpu_s"] for end in ends))


class _LoadProcess(ChildProcess):
    def __init__(self, spec: LoadSpec) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__(make_command_line(spec), None, ignores_ctrl_c=True, **pipes)

    def send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise InternalError(f"the load generator ended with exit status {self.process.wait(10)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def last(self) -> dict[str, Any]:
        """Return the process's totals; ignore a window that ended after the stop command was sent."""
        while "latencies" in (found := self.answer()):
            pass
        return found
