"""The benchmark of peers end to end: Penstock through all steps, and servers that are hard to stop."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.peers.failures import StartFailed
from benchmarks.peers.peer import Launch, find_free_ports
from benchmarks.peers.servers import Server
from benchmarks.waiting import eventually
from tests.servers import ROOT

RUN_TIMEOUT_S = 170.0
TINY = ("--quick", "--scale", "0.1", "--only", "penstock", "--only", "noop", "--callers", "32")
# Serves, and starts a process in its own session that ignores SIGTERM; its id is written to a file.
DETACHES = """
import http.server, subprocess, sys
child = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
open("child", "w").write(str(subprocess.Popen(child, start_new_session=True).pid))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    files = ("--json", str(folder / "peers.json"), "--settings", str(folder / "settings.json"))
    command = [sys.executable, "-m", "benchmarks.peers", *TINY, *files, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done


def read(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.mark.timeout(400)
def test_penstock_is_tuned_measured_and_shown(tmp_path: Path) -> None:
    run(tmp_path, "--tune")
    candidates = read(tmp_path / "settings.json")["noop"]["penstock"]
    assert len(candidates) > 1
    assert all(one["rps"][0] > 0 and not one["failure"] for one in candidates)
    (winner,) = (one for one in candidates if one["is_winner"])

    shown = run(tmp_path, "--markdown", str(tmp_path / "peers.md")).stdout
    (record,) = read(tmp_path / "peers.json")["records"]
    assert (record["server"], record["setting"], record["failure"]) == ("penstock", winner["setting"], "")
    windows = {(row["protocol"], row["concurrency"]) for row in record["rows"]}
    assert windows == {(protocol, 32) for protocol in ("rest", "grpc", "stream")}
    for row in record["rows"]:
        assert row["rps"] > 0
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["cpu_ms"] > 0
        assert row["memory_mib"] > 10
        assert not row["rejected"]
    assert f"| {record['title']} | {winner['setting']} | stream |" in shown
    assert shown.strip() == (tmp_path / "peers.md").read_text().strip()

    before = read(tmp_path / "peers.json")
    assert "round 1" not in run(tmp_path, "--resume").stderr, "the resumed run measures nothing again"
    assert read(tmp_path / "peers.json") == before


def test_a_server_is_stopped_with_its_detached_processes(tmp_path: Path) -> None:
    (port,) = find_free_ports(1)
    launch = Launch((sys.executable, "-c", DETACHES, str(port)), {}, {}, f"http://127.0.0.1:{port}/")
    with Server(launch, tmp_path) as server:
        child = psutil.Process(int((tmp_path / "child").read_text()))
        own = psutil.Process().memory_info().rss
        assert 2_000_000 < server.usage().memory_bytes < own * 10
        assert server.usage().cpu_s > 0
    gone = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # possibly no process reaps it
    eventually(lambda: not child.is_running() or child.status() in gone, "the detached process ended")


def test_a_server_that_ends_reports_the_reason(tmp_path: Path) -> None:
    launch = Launch((sys.executable, "-c", "raise SystemExit('no such model')"), {}, {}, "http://127.0.0.1:9/")
    with pytest.raises(StartFailed, match="exit status 1 before it was ready: no such model"), Server(launch, tmp_path):
        pass


def test_a_server_that_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    launch = Launch((sys.executable, "-c", "import time; time.sleep(600)"), {}, {}, "http://127.0.0.1:1/")
    server = Server(launch, tmp_path, timeout_s=0.5)
    with pytest.raises(StartFailed, match="not ready within"), server:
        pass
    assert server.usage().memory_bytes == 0
