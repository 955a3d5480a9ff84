"""Commands while a user runs two servers: a command never changes a server that was not chosen."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.experiments.processes import ServerRun
from tests.servers import write_identity


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerRun, ServerRun, Path]]:
    """Two servers with a data directory of the same relative name, and the folder that contains their folders."""
    parent = tmp_path_factory.mktemp("two")
    write_identity(parent / "models", "identity", "FP32")
    with ExitStack() as stack:
        servers = []
        for name in ("one", "two"):
            folder = parent / name
            folder.mkdir()
            flags = ("--data-dir", "penstock-data")
            servers.append(stack.enter_context(ServerRun(parent / "models", folder, *flags, cwd=folder)))
        (parent / "three").mkdir()
        yield servers[0], servers[1], parent


def penstock(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CONFIG_HOME": str(folder.parent / "config")}
    command = [sys.executable, "-m", "penstock", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def asks_for_key(server: ServerRun) -> bool:
    return penstock(Path("/"), "infer", "identity", "-i", "x=[1]", "--server", server.http).returncode != 0


def test_a_command_in_an_unrelated_folder_refuses_and_names_both(pair: tuple[ServerRun, ServerRun, Path]) -> None:
    one, two, parent = pair
    refused = penstock(parent / "three", "key", "create", "app")
    assert refused.returncode == 2
    for server, name in ((one, "one"), (two, "two")):
        assert f"--server http://{server.http}   data directory {parent / name}/penstock-data" in refused.stderr
        assert not asks_for_key(server)


def test_every_command_finds_the_server_of_its_folder(pair: tuple[ServerRun, ServerRun, Path]) -> None:
    one, two, parent = pair
    shown = penstock(parent / "two", "status")
    assert f"at http://{two.http}: ready" in shown.stdout
    assert penstock(parent / "two", "infer", "identity", "-i", "x=[1]").returncode == 0
    assert "gateway-0" in penstock(parent / "two", "cluster", "status").stdout
    for address in (f"http://{one.http}", one.http, f"{parent}/one/penstock-data"):
        listed = penstock(parent / "three", "worker", "list", "--json", "--server", address)
        assert len(json.loads(listed.stdout)) == 1, listed.stderr
        assert penstock(parent / "three", "infer", "identity", "-i", "x=[1]", "--server", address).returncode == 0
    by_grpc = penstock(parent / "three", "infer", "identity", "-i", "x=[1]", "--server", one.grpc)
    assert by_grpc.returncode == 0, by_grpc.stderr


def test_a_command_reports_which_server_it_changed(pair: tuple[ServerRun, ServerRun, Path]) -> None:
    one, two, parent = pair
    assert penstock(parent / "three", "context", "add", "first", f"{parent}/one/penstock-data").returncode == 0
    assert penstock(parent / "three", "context", "use", "first").returncode == 0
    made = penstock(parent / "three", "key", "create", "app")
    assert made.stdout.startswith("psk_"), made.stderr
    assert f"changed the server http://{one.http} (data directory {parent}/one/penstock-data)" in made.stderr
    assert asks_for_key(one)
    assert not asks_for_key(two)
