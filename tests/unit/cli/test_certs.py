"""`penstock certs`: an authority and what it issues, for people and for programs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.core.errors import ConfigError
from penstock.wire.credentials.files import TlsFiles, read_files


def call(*args: str, folder: Path) -> str:
    result = CliRunner().invoke(app, ["certs", *args, "--folder", str(folder)])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_an_authority_and_a_certificate_that_a_server_takes(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    assert "keep it, and give it to nobody" in call("init", folder=folder)
    text = call("issue", "server", "--host", "10.1.2.3", "--days", "3", folder=folder)
    assert "10.1.2.3" in text
    assert f"cert: {folder / 'server.pem'}" in text
    assert read_files(TlsFiles(*(str(folder / name) for name in ("server.pem", "server-key.pem", "ca.pem")))).cert


def test_a_server_s_certificate_is_for_this_machine_unless_told_otherwise(tmp_path: Path) -> None:
    made = json.loads(call("init", "--json", folder=tmp_path))
    server = json.loads(call("issue", "server", "--json", folder=tmp_path))
    assert made["ca"] == server["ca"] == str(tmp_path / "ca.pem")
    assert {"server", "localhost", "127.0.0.1", "::1"} <= set(server["names"])
    assert json.loads(call("issue", "alice", "--client", "--json", folder=tmp_path))["names"] == ["alice"]


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="penstock certs init"):
        call("issue", "server", folder=tmp_path)
