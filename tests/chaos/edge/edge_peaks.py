"""Measures the peak memory of the Envoy and gateway processes that a scenario has started."""

import threading
from collections import defaultdict

import psutil

LOOK_S = 0.2


class EdgePeaks:
    """A context manager that samples the processes' memory."""

    def __init__(self) -> None:
        self._most: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_forever, daemon=True)

    def __enter__(self) -> "EdgePeaks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def get_max_mib(self, role: str) -> float:
        return max((size for (found, _), size in self._most.items() if found == role), default=0) / 2**20

    def details(self) -> dict[str, list[int]]:
        return {
            role: sorted(round(size / 2**20) for (found, _), size in self._most.items() if found == role)
            for role in ("envoy", "gateway")
        }

    def _look_forever(self) -> None:
        while not self._is_over.wait(LOOK_S):
            for process in psutil.Process().children(recursive=True):
                try:
                    if role := _role(process):
                        key = role, process.pid
                        self._most[key] = max(self._most[key], process.memory_info().rss)
                except psutil.Error:
                    continue  # the process has just ended


def _role(process: psutil.Process) -> str:
    if process.name() == "envoy":
        return "envoy"
    command = process.cmdline()
    return "gateway" if "gateway" in command and "penstock" in command else ""
