"""Processes that hang: the server must detect and replace them, and other callers wait no longer than that."""

import asyncio
import ctypes
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

from benchmarks.waiting import until_seen
from tests.chaos.attack.strike import Attack, Scene

HANG_S = 5.0  # as the server's default
LOOP_HANG_S = 30.0  # as the server has it
PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
EVERY_CALLER = 4  # each caller may lose a request that the killed process had


async def _hang_event_loop(scene: Scene) -> None:
    tracing: list[asyncio.Task[None]] = []
    await _hang_until_replaced(
        scene, "gateway", lambda pid: tracing.append(asyncio.create_task(asyncio.to_thread(_hold, pid)))
    )
    await asyncio.gather(*tracing)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def _hold(pid: int) -> None:
    """Stop only the main thread of a process until the process ends; its other threads continue."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        if libc.ptrace(request, pid, None, None):
            raise OSError(ctypes.get_errno(), f"ptrace of {pid} is not allowed")
    while not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):  # the kernel reports the process's end to its tracer first
        pass


async def _hang_until_replaced(scene: Scene, role: str, hang: Callable[[int], object]) -> None:
    before = scene.server.children(role)
    connections = Counter(each.pid for each in psutil.net_connections("inet") if each.status == "ESTABLISHED")
    name = max(before, key=lambda name: connections[before[name]])  # of gateways, the one with the neighbours
    hang(before[name])

    def is_exchanged() -> bool:
        now = scene.server.children(role)
        return now.keys() == before.keys() and now[name] != before[name]

    await until_seen(is_exchanged, f"{name} is a new process", HANG_S + LOOP_HANG_S + 15)
    await until_seen(lambda: _read_metric(scene, name) >= 1, "the exchange is counted")
    await scene.server.wait_all_workers()


def _read_metric(scene: Scene, name: str) -> float:
    return scene.server.metric("penstock_restarts", process=name, reason="hung")


TWO_GATEWAYS: dict[str, Any] = {"flags": ("--gateways", "2"), "failures": EVERY_CALLER, "ends_processes": True}
ATTACKS = (
    Attack(
        "7 stopped gateway", partial(_hang_until_replaced, role="gateway", hang=_stop), hang_s=HANG_S, **TWO_GATEWAYS
    ),
    Attack(
        "7 hung loop of a gateway",
        _hang_event_loop,
        hang_s=LOOP_HANG_S,
        **TWO_GATEWAYS,
    ),
    Attack(
        "7 stopped worker",
        partial(_hang_until_replaced, role="worker", hang=_stop),
        ("--workers", "2"),
        hang_s=HANG_S,
        ends_processes=True,
    ),
)
