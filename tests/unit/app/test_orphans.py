"""Children that ended: a waiting parent gets the exit code, and children without a waiting parent are reaped."""

import subprocess

import psutil

from benchmarks.waiting import eventually
from penstock.app.orphans import Orphans


def test_only_children_that_nobody_waits_for_are_reaped() -> None:
    orphans = Orphans()
    with subprocess.Popen(["true"]) as child:
        eventually(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        orphans.reap()
        assert psutil.pid_exists(child.pid), "its parent may not have waited for it yet"
        orphans.reap()
        assert not psutil.pid_exists(child.pid)
        orphans.reap()
