"""`penstock key` on a real server that requires keys before the first one exists."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.server import ServerProcess, find_local_managers
from penstock.cli.main import app
from tests.servers import write_identity


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--keys",), "there are no keys, and this server refuses calls without one"),
        ((), "there are no keys: endpoints on loopback require none"),
    ],
)
def test_the_list_of_keys_says_whether_a_server_without_keys_is_open(
    tmp_path: Path, flags: tuple[str, ...], expected: str
) -> None:
    write_identity(tmp_path / "models", "identity", "FP32")
    with ServerProcess(tmp_path / "models", tmp_path / "server", *flags) as server:
        (socket,) = find_local_managers(server.log.parent / "data")
        result = CliRunner().invoke(app, ["key", "list", "--server", socket])
        wrong = CliRunner().invoke(app, ["key", "create", "x", "--scope", "nothing", "--server", socket])
    assert "unknown scope 'nothing'; use inference" in str(wrong.exception)
    assert result.exit_code == 0, result.output
    assert expected in " ".join(result.output.split())
