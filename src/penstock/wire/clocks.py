"""Compares the manager's clock with this machine's clock when a role joins."""

import time

import structlog

from penstock.core.cluster.access_view import compute_clock_ahead_s

log = structlog.get_logger()


def measure_clock_ahead(manager_s: float) -> float:
    """Return the seconds by which the manager's clock is ahead of this machine's clock; log a large difference."""
    ahead_s = compute_clock_ahead_s(manager_s, time.time())
    if ahead_s:
        log.warning(
            "clock_differs",
            manager_ahead_s=round(ahead_s),
            advice="session tokens are checked by the manager's clock; set the clocks of all hosts by NTP",
        )
    return ahead_s
