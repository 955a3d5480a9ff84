"""The live view of a real server: `penstock top` as a program and on a terminal, and the stream behind it."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from tests.nvml import HAS_COMPILER, make_stub_environment
from tests.servers import ROOT, floats_json, write_identity, write_slow

WITHIN_S = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("top") / "models"
    write_identity(repository, "identity", "FP32")
    write_slow(repository, "slow", "batching: {max_rows: 1}\ninstances: {count: 1}\n")
    return repository


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    environment = make_stub_environment(tmp_path_factory.mktemp("driver"))
    with ServerProcess(models, tmp_path_factory.mktemp("server"), "--workers", "2", environment=environment) as running:
        yield running


@contextlib.contextmanager
def load(server: ServerProcess) -> Iterator[None]:
    """Send requests to `identity`, and some to an unknown model, while the context lasts."""
    stop = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=server.http_url, timeout=WITHIN_S) as client:
            while not stop.wait(0.005):
                client.post("/v2/models/identity/infer", json=floats_json(1.0, 2.0))
                client.post("/v2/models/nobody/infer", json=floats_json(1.0))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def top(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, cwd=ROOT, check=False)


class Terminal:
    """`penstock top` on a terminal of 80 columns and 24 lines."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        command = [sys.executable, "-m", "penstock", "top", *arguments]
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.raw = ""

    def text(self) -> str:
        """Return everything drawn so far, without colors."""
        while select.select([self._ours], [], [], 0.05)[0]:
            self.raw += os.read(self._ours, 65536).decode(errors="replace")
        return ESCAPES.sub("", self.raw)

    def wait(self, is_there: Callable[[str], object], what: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not is_there(self.text()):
            assert self.process.poll() is None, f"it ended: {self.text()}"
            assert time.monotonic() < deadline, f"{what} was never there: {self.text()[-3000:]}"

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        deadline = time.monotonic() + WITHIN_S
        while self.process.poll() is None:
            self.text()
            assert time.monotonic() < deadline, "the command ends in time"
        self.text()
        return self.process.returncode

    @property
    def settings(self) -> list[object]:
        return list(termios.tcgetattr(self._theirs))

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


def test_top_once_prints_the_requests_of_the_interval_as_json(server: ServerProcess) -> None:
    with load(server):
        done = top("--once", "--json", "--interval", "2", "--server", server.http_url)
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout)
    assert view["seconds"] >= 2
    assert view["work"]["by_code"].keys() == {"ok", "unknown_model"}
    assert view["requests_by_model"].keys() == {"", "identity"}
    assert view["work"]["latency"]["p50_ms"] <= view["work"]["latency"]["p99_ms"]
    assert all(phase["count"] > 0 for phase in view["work"]["phases"].values())
    identity, slow = sorted(view["blocks"], key=lambda block: str(block["model"]))
    assert identity["work"]["requests_per_s"] == view["work"]["by_code"]["ok"]
    assert identity["work"]["batches"]["rows_mean"] >= 1
    assert sum(identity["work"]["batches"]["closed"].values()) == pytest.approx(identity["work"]["batches"]["per_s"])
    assert slow["work"]["requests_per_s"] == 0
    assert [worker["state"] for worker in view["workers"]] == ["ready", "ready"]
    assert all(worker["memory_bytes"] > 2**20 for worker in view["workers"])
    assert all(len(worker["blocks"]) == 2 for worker in view["workers"])
    assert sum(worker["instances"]["idle"] + worker["instances"]["busy"] for worker in view["workers"]) >= 4


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C compiler")
def test_top_shows_gpus(server: ServerProcess) -> None:
    view = json.loads(top("--once", "--json", "--interval", "0.2", "--server", server.http_url).stdout)
    status = httpx.get(f"{server.http_url}/v1/status").json()
    for devices in (view["devices"], status["devices"]):
        assert [device["uuid"] for device in devices] == ["GPU-a", "GPU-b"]
        assert (devices[0]["used_bytes"], devices[0]["memory_bytes"], devices[0]["busy"]) == (700, 1000, 0.42)
        assert devices[0]["workers"] == ["worker-0", "worker-1"]
    assert [device["device"] for device in status["workers"][0]["devices"]] == ["cuda:0", "cuda:1"]
    assert server.metric("penstock_device_memory_bytes", uuid="GPU-a", gpu="Stub", kind="used") == 700


def test_several_json_views_are_printed_one_per_line(server: ServerProcess) -> None:
    done = top("-n", "2", "--json", "--interval", "0.2", "--server", server.http_url)
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["at"] < second["at"]


def test_without_a_terminal_top_prints_plain_text(server: ServerProcess) -> None:
    done = top("--once", "--interval", "0.2", "--server", server.http_url)
    assert done.returncode == 0, done.stderr
    assert "identity" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_missing_server_is_reported_plainly() -> None:
    done = top("--server", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("penstock: no answer")
    assert "is `penstock serve` running" in done.stderr


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_a_screen_is_drawn_and_a_key_closes_it(server: ServerProcess, key: str) -> None:
    with load(server), Terminal("--server", server.http_url, "--interval", "0.5") as terminal:
        terminal.wait(lambda text: re.search(r"identity:1 +ready +[1-9]", text), "the block's requests")
        expected = ("penstock", "requests", "compute", "worker-0", "worker-1", "q quits")
        terminal.wait(lambda text: all(each in text for each in expected), "the whole screen")
        terminal.type(key)
        assert terminal.end() == 0
        assert "\x1b[?1049l" in terminal.raw[-40:]  # left the alternate screen, printed nothing since
        assert terminal.settings == terminal.before
        assert "Traceback" not in terminal.raw


def test_a_given_count_of_refreshes_ends_top(server: ServerProcess) -> None:
    with Terminal("--server", server.http_url, "--interval", "0.2", "-n", "2") as terminal:
        assert terminal.end() == 0
        assert "worker-0" in terminal.text()


def test_top_survives_a_restart_of_the_server(models: Path, tmp_path: Path) -> None:
    with (
        ServerProcess(models, tmp_path) as server,
        Terminal("--server", server.http_url, "--interval", "0.2") as terminal,
    ):
        terminal.wait(lambda text: "worker-0" in text, "the first look")
        server.terminate()
        terminal.wait(lambda text: "reconnecting" in text, "that it is gone")
        with ServerProcess(models, tmp_path, "--http-port", str(server.http_port)):
            terminal.raw = ""
            terminal.wait(lambda text: re.search(r"penstock \S+ ready http", text), "that it is back")
            terminal.type("q")
            assert terminal.end() == 0


def test_a_stream_neither_delays_a_drain_nor_is_cut_off(models: Path, tmp_path: Path) -> None:
    """A cut-off answer would end without its last chunk, and raise an exception here."""
    answers: list[int] = []
    events: list[str] = []
    with ServerProcess(models, tmp_path) as server:

        def ask() -> None:
            answers.append(
                httpx.post(f"{server.http_url}/v2/models/slow/infer", json=floats_json(2000.0), timeout=60).status_code
            )

        def watch() -> None:
            with httpx.stream("GET", f"{server.http_url}/v1/live?interval=0.2", timeout=60) as answer:
                events.extend(line for line in answer.iter_lines() if line.startswith("data: "))
                events.append("the end")

        threads = [threading.Thread(target=watch), threading.Thread(target=ask)]
        for thread in threads:
            thread.start()
        eventually(lambda: server.metric("penstock_inflight_requests") == 1, "the slow request is inside")
        assert server.terminate() == 0
        for thread in threads:
            thread.join(WITHIN_S)
    assert answers == [200]
    assert events[-1] == "the end"
    assert json.loads(events[-2].removeprefix("data: "))["draining"] is True
