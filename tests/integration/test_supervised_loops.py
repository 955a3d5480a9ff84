"""Every supervised loop of every role continues after an exception."""

import ast
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
from websockets.sync.client import connect

from benchmarks.cluster import start_manager
from benchmarks.hosts import HostProcess
from benchmarks.server import ServerProcess
from benchmarks.valkey import Valkey
from benchmarks.waiting import eventually
from tests.digits import GRAY, write_digits
from tests.directory_bed import DirectoryProcess
from tests.servers import PROCESS_NAMESPACE, ROOT, floats_json, write_factor
from tests.tls import TestAuthority

FAILING_LOOPS = ROOT / "tests" / "data" / "failing_loops"  # its sitecustomize.py makes each loop's first pass fail
HEALTH_PORTS = ("--health-port", "0", "--health-grpc-port", "0")


def declared_loops() -> set[str]:
    """Return the names of all loops in the source; for a formatted name, the part before its first variable."""
    found: set[str] = set()
    for file in (ROOT / "src" / "penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "supervise":
                name = node.args[0]
                if isinstance(name, ast.JoinedStr):
                    name = name.values[0]
                assert isinstance(name, ast.Constant), f"a loop's name begins with a constant: {file}"
                found.add(str(name.value))
    return found


class Passes:
    """The passes of loops which failing_loops' sitecustomize.py records: one line for the first and second of each."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.environment = {"PYTHONPATH": f"{FAILING_LOOPS}:{ROOT / 'src'}", "FAILING_LOOPS": str(file)}

    def lines(self) -> list[str]:
        return self._file.read_text().splitlines()

    def names(self) -> set[str]:
        return {line.split()[2] for line in self.lines()}

    def stopped(self) -> set[str]:
        """Return the loops that have not started a second pass."""
        lines = [line.rpartition(" ") for line in self.lines()]
        second = {loop for loop, _, number in lines if number == "2"}
        return {loop for loop, _, number in lines if number == "1"} - second


def test_every_loop_continues_after_an_exception(tmp_path: Path) -> None:
    write_factor(tmp_path / "models", "double", 2.0)
    write_digits(tmp_path / "models", "digits", ["n", 1, 8, 8], f"{GRAY}placement: pool\n")
    authority = TestAuthority(tmp_path / "certificates")
    passes = Passes(tmp_path / "passes")
    with ExitStack() as stack:
        valkey = stack.enter_context(Valkey(tmp_path / "valkey"))
        directory = stack.enter_context(DirectoryProcess(tmp_path / "directory", environment=passes.environment))
        settings = {
            "watch": True,
            "edge": "envoy",
            "tls": {"ca": authority.ca},
            "worker": {"task_processes": 1},
            "response_cache": {"url": f"sqlite:///{tmp_path / 'cache.db'}"},
            "request_log": {"url": "sqlite:///requests.db"},
            "cluster": {"id": "looped"},
            "directory": {"url": directory.url, "public_url": "https://looped.example.com", "lease_s": 3},
            "triggers": [{"command": ["true"]}],
            "access": {"limits_url": valkey.url, "anonymous_limits": {"requests_per_s": 1000}},
        }
        server = stack.enter_context(
            ServerProcess(
                tmp_path / "models",
                tmp_path / "server",
                settings=settings,
                environment=passes.environment,
                before=PROCESS_NAMESPACE,
            )
        )
        (first,) = psutil.Process(server.pid).children()
        stack.callback(first.terminate)
        stack.enter_context(connect(f"ws://127.0.0.1:{server.http_port}/v1/admin/watch"))

        def is_answering() -> bool:
            answer = httpx.post(f"{server.http_url}/v2/models/double/infer", json=floats_json(1.0), timeout=30)
            return bool(answer.json()["outputs"][0]["data"] == [2.0])

        assert is_answering()  # so that the server looks up limits
        eventually(lambda: not passes.stopped(), "every loop has begun its second pass")
        assert is_answering()
        eventually(lambda: httpx.get(f"{server.http_url}/v2/health/ready").is_success, "the server is ready")
        assert server.metric("penstock_background_failures") >= len(passes.lines()) // 4

        manager = start_manager(tmp_path / "models", tmp_path / "manager", **passes.environment)
        stack.callback(manager.kill)
        (started,) = manager.lines("manager_started")
        joining = [sys.executable, "-m", "penstock", "serve", "--join", started["address"], "--data-dir"]
        joining += [str(tmp_path / "joined"), "--http-port", "0", "--grpc-port", "0", "--bind", "127.0.0.1:0"]
        joined = HostProcess([*joining, *HEALTH_PORTS], tmp_path / "joined.log", passes.environment)
        stack.callback(joined.kill)
        eventually(lambda: "worker-report" in passes.names(), f"the joined worker reports: {joined.log}")
        eventually(lambda: not passes.stopped(), "every loop of every role has begun its second pass")
    missing = {name for name in declared_loops() if not any(loop.startswith(name) for loop in passes.names())}
    assert not missing
