"""`penstock certs`: an authority and the certificates that it issues."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.core.errors import ConfigError
from penstock.wire.credentials.tls_files import TlsFiles, read_files


def call(*args: str, folder: Path) -> str:
    result = CliRunner().invoke(app, ["certs", *args, "--folder", str(folder)])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_server_uses_an_issued_certificate(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    assert "Keep it secret" in call("init", folder=folder)
    text = call("issue", "server", "--host", "10.1.2.3", "--days", "3", folder=folder)
    assert "10.1.2.3" in text
    assert f"cert: {folder / 'server.pem'}" in text
    assert read_files(TlsFiles(*(str(folder / name) for name in ("server.pem", "server-key.pem", "ca.pem")))).cert


def test_a_server_certificate_is_for_this_machine_by_default(tmp_path: Path) -> None:
    made = json.loads(call("init", "--json", folder=tmp_path))
    server = json.loads(call("issue", "server", "--json", folder=tmp_path))
    assert made["ca"] == server["ca"] == str(tmp_path / "ca.pem")
    assert {"server", "localhost", "127.0.0.1", "::1"} <= set(server["names"])
    assert json.loads(call("issue", "alice", "--client", "--json", folder=tmp_path))["names"] == ["alice"]


def test_impossible_requests_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="penstock certs init"):
        call("issue", "server", folder=tmp_path)
