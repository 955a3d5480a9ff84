"""Sample the CPU and memory of a server's processes during a load."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Self

import psutil

PERIOD_S = 0.25
ROLES = ("gateway", "worker")
MIB = 1024 * 1024


class UsageSample(NamedTuple):
    """One sample: CPU in percent of one core since the previous sample, and resident memory in MiB."""

    at_s: float
    gateway_cpu: float
    worker_cpu: float
    gateway_mib: float
    worker_mib: float


class Sampler:
    """A context manager that samples usage while the `with` block runs; sample times count from the block's start."""

    def __init__(self, pid: int) -> None:
        self.samples: list[UsageSample] = []
        self._main = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._start = 0.0

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(psutil.NoSuchProcess):  # the server has ended; the load generator reports the failure
            before, moment = usage(self._main), time.monotonic()
            while not self._over.wait(PERIOD_S):
                found, now = usage(self._main), time.monotonic()
                cpu = [100 * max(0.0, found[role][0] - before[role][0]) / (now - moment) for role in ROLES]
                memory = [found[role][1] / MIB for role in ROLES]
                numbers = (round(number, 1) for number in (*cpu, *memory))
                self.samples.append(UsageSample(round(now - self._start, 3), *numbers))
                before, moment = found, now


def usage(main_process: psutil.Process) -> dict[str, tuple[float, int]]:
    """Return a server's CPU seconds so far and resident bytes by role."""
    sums = dict.fromkeys(ROLES, (0.0, 0))
    for process in (main_process, *main_process.children(recursive=True)):
        role = "worker" if process != main_process and "gateway" not in process.cmdline() else "gateway"
        times = process.cpu_times()
        seconds, size = sums[role]
        sums[role] = (seconds + times.user + times.system, size + process.memory_info().rss)
    return sums


def compute_mean_cpu(samples: Sequence[UsageSample]) -> dict[str, float]:
    return {role: sum(getattr(each, f"{role}_cpu") for each in samples) / max(1, len(samples)) for role in ROLES}


def compute_peak_mib(samples: Sequence[UsageSample]) -> dict[str, float]:
    return {role: max((getattr(each, f"{role}_mib") for each in samples), default=0.0) for role in ROLES}
