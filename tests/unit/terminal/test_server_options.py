"""Commands choose a server by address, by saved context, or by the data directory of the folder."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import main as cli
from penstock.core.config import load_config
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.storage.process_addresses import ServerPaths
from penstock.storage.server_folders import list_running_servers
from penstock.terminal.server_options import Server

run = CliRunner().invoke


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make a temporary folder, a configuration folder and a current folder for this test."""
    for name in ("tmp", "config", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def say(*arguments: str) -> str:
    result = run(cli.app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_without_any_choice_a_command_refuses(folders: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no server is chosen.*here/penstock-data.*--server ADDRESS"):
        Server(None).http  # noqa: B018


def test_an_address_is_chosen_over_a_context(folders: Path) -> None:
    say("context", "add", "lab", "http://lab:1")
    say("context", "use", "lab")
    assert Server(None).http == "http://lab:1"
    assert Server(None).label == "http://lab:1 (context 'lab')"
    assert Server("other").http == "http://other:8080"
    assert Server("grpcs://other:1").grpc == "grpcs://other:1"
    assert Server("one:7400,two").managers == ["one:7400", "two:7400"]


def test_the_environment_variable_works_like_the_option(folders: Path) -> None:
    result = run(cli.app, ["status"], env={"PENSTOCK_SERVER": "127.0.0.1:1"})
    assert isinstance(result.exception, PenstockError)
    assert "127.0.0.1:1" in result.exception.message


def test_contexts_are_listed_and_removed(folders: Path) -> None:
    (folders / "here" / "key").write_text("psk_of_the_lab\n")
    say("context", "add", "lab", "https://lab", "--key-file", "key", "--ca", "ca.pem")
    say("context", "add", "mine", "./penstock-data")
    say("context", "use", "lab")
    listed = json.loads(say("context", "list", "--json"))
    assert [(each["name"], each["is_current"]) for each in listed] == [("lab", True), ("mine", False)]
    assert listed[1]["server"] == str(folders / "here" / "penstock-data")
    access = Server(None).access
    assert (access.key, access.ca) == ("psk_of_the_lab", str(folders / "here" / "ca.pem"))
    assert isinstance(run(cli.app, ["context", "use", "nope"]).exception, InvalidRequest)
    say("context", "remove", "lab")
    with pytest.raises(InvalidRequest, match="no server is chosen"):
        Server(None).http  # noqa: B018


def test_a_configuration_has_absolute_paths(folders: Path) -> None:
    given = load_config(tls={"cert": "a.pem", "key": "b.pem"}, registry={"objects": "objects"})
    ServerPaths(folders / "tmp").write_config(given)
    found = ServerPaths(folders / "tmp").read_config()
    here = folders / "here"
    assert (found.data_dir, found.models) == (here / "penstock-data", here / "models")
    assert (found.tls.cert, found.registry.objects) == (str(here / "a.pem"), str(here / "objects"))


def test_the_folder_of_a_killed_server_is_no_server(folders: Path) -> None:
    folder = folders / "tmp" / "penstock-killed"
    folder.mkdir()
    ServerPaths(folder).write_config(load_config())
    assert list_running_servers() == []
