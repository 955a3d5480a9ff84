"""Ends the processes of one server that are not in the process group of the started process.

All of them have the server's own mark in their environment. Run with the mark, and with folders to remove.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

VARIABLE = "PEER_MARK"
ROUNDS, PAUSE_S = 50, 0.1


def end(mark: str) -> None:
    for _ in range(ROUNDS):  # one that is about to start another may be killed after it has done so
        found = marked(mark)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)


def marked(mark: str) -> list[int]:
    entry = f"{VARIABLE}={mark}".encode()
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and entry in environment(pid)]


def environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user
        return []


if __name__ == "__main__":
    end(sys.argv[1])
    for folder in sys.argv[2:]:
        shutil.rmtree(folder, ignore_errors=True)
