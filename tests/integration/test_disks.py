"""Servers on full or read-only disks, in separate mount namespaces."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from tests.servers import floats_json, log_lines, write_factor

MOUNT = 'for each in "$0/tmp" "$0/server/data"; do mkdir -p "$each"; mount -t tmpfs -o size=4m tmpfs "$each"; done; '
CACHE = {"response_cache": {"url": "sqlite://"}}


def start(folder: Path, then: str = "") -> ServerProcess:
    before = ("unshare", "--mount", "sh", "-c", f'set -e; {MOUNT}{then} exec "$@"', str(folder))
    environment = {"TMPDIR": str(folder / "tmp")}
    return ServerProcess(folder / "models", folder / "server", settings=CACHE, environment=environment, before=before)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Return a short path, because sockets have room for no longer one."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_factor(tmp_path / "models", "factor", 2.0, "cache: {enabled: true}\n")
    return tmp_path / "models"


@pytest.fixture
def server(models: Path) -> Iterator[ServerProcess]:
    with start(models.parent) as running:
        yield running


def seen_by(server: ServerProcess, path: Path) -> Path:
    """Return the path of a file in the server's mount namespace."""
    return Path(f"/proc/{server.pid}/root{path}")


def fill(folder: Path) -> Path:
    file = folder / "filler"
    with file.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(1024))
        except OSError:
            return file


def ask(server: ServerProcess, number: float) -> float:
    answer = httpx.post(f"{server.http_url}/v2/models/factor/infer", json=floats_json(number), timeout=30)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["outputs"][0]["data"]
    return float(found)


def route(server: ServerProcess, policy: str) -> httpx.Response:
    return httpx.put(f"{server.http_url}/v1/models/factor/routing", json={"policy": policy}, timeout=30)


def test_full_disks_fail_no_request(server: ServerProcess, tmp_path: Path) -> None:
    assert ask(server, 1.0) == 2.0
    before = server.children("worker") | server.children("gateway")
    fillers = [fill(seen_by(server, tmp_path / place)) for place in ("tmp", "server/data")]
    for number in range(2, 50):
        assert ask(server, float(number)) == 2.0 * number
    refused = route(server, "random")
    assert refused.status_code == 503
    assert "data directory cannot be written" in refused.json()["error"]["message"]
    assert str(tmp_path) not in refused.text
    write_factor(tmp_path / "models", "new", 3.0)
    loaded = httpx.post(f"{server.http_url}/v2/repository/models/new/load", timeout=60)
    assert loaded.status_code == 200, loaded.text
    assert httpx.get(f"{server.http_url}/metrics").status_code == 200
    assert server.children("worker") | server.children("gateway") == before, "no process ended"
    for filler in fillers:
        filler.unlink()
    assert route(server, "random").status_code == 200
    said = {line["event"] for line in log_lines(server.log)}
    assert {"metadata_not_written", "metadata_unwritable", "block_id_not_stored", "cache_file_failed"} <= said
    eventually(
        lambda: "cache_file_recovered" in {line["event"] for line in log_lines(server.log)}, "the cache is written"
    )
    assert not server.tracebacks()


def test_a_read_only_data_directory_is_reported_and_served(models: Path) -> None:
    """The server starts and logs it; writes are refused or last until the end of the process."""
    read_only = 'mount -o remount,ro "$0/server/data";'
    with start(models.parent, read_only) as server:
        assert ask(server, 4.0) == 8.0
        assert ask(server, 4.0) == 8.0
        assert route(server, "random").status_code == 503
        told = {line["event"]: line for line in log_lines(server.log)}
        assert {"data_dir_unwritable", "metadata_unwritable", "block_id_not_stored", "cache_file_failed"} <= told.keys()
        advised = [line for line in log_lines(server.log) if "--data-dir" in line.get("advice", "")]
        assert [line["event"] for line in advised] == ["metadata_unwritable"], "the advice is logged once"
        assert not server.tracebacks()
