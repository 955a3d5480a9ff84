"""Ended children: who waits for one hears of its end, and of those for whom nobody waits nothing is left."""

import subprocess

import psutil

from benchmarks.waiting import eventually
from penstock.app.orphans import Orphans


def test_only_what_nobody_waits_for_is_taken_away() -> None:
    orphans = Orphans()
    with subprocess.Popen(["true"]) as child:
        eventually(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        orphans.look()
        assert psutil.pid_exists(child.pid), "whoever started it may not have looked yet"
        orphans.look()
        assert not psutil.pid_exists(child.pid)
        orphans.look()
