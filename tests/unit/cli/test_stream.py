"""Which frames `penstock stream` takes, and what it says when it cannot."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import stream
from penstock.cli.stream import find_frames
from penstock.cli.terminal.frames import _write
from penstock.core.errors import InvalidRequest, PenstockError, Unavailable

NOBODY = "127.0.0.1:1"


def problem(*arguments: str) -> PenstockError:
    app = typer.Typer()
    app.command()(stream.stream)
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, PenstockError), result.output
    return result.exception


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")


def test_frames_come_as_given_and_from_folders_by_name(tmp_path: Path) -> None:
    touch(tmp_path / "shot", "2.png", "1.JPG", "10.jpeg", "notes.txt")
    touch(tmp_path, "last.png", "first.png")
    given = [tmp_path / "first.png", tmp_path / "shot", tmp_path / "last.png"]
    assert [file.name for file in find_frames(given)] == ["first.png", "1.JPG", "2.png", "10.jpeg", "last.png"]


def test_frames_that_are_not_there(tmp_path: Path) -> None:
    touch(tmp_path / "empty", "notes.txt")
    with pytest.raises(InvalidRequest, match="no such file"):
        find_frames([tmp_path / "none.png"])
    with pytest.raises(InvalidRequest, match="has no"):
        find_frames([tmp_path / "empty"])


def test_files_are_numbered_and_named_after_what_they_are(tmp_path: Path) -> None:
    for number, data in enumerate((b"\x89PNG...", b"\xff\xd8...", b"?"), start=1):
        _write(tmp_path / "out", number, data)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["000001.png", "000002.jpg", "000003.bin"]


@pytest.mark.parametrize("transport", [("grpc", "--grpc"), ("websocket", "--http")])
def test_without_a_server(tmp_path: Path, transport: tuple[str, str]) -> None:
    touch(tmp_path, "a.png")
    name, option = transport
    found = problem(str(tmp_path / "a.png"), "-o", str(tmp_path / "out"), "--transport", name, option, NOBODY)
    assert isinstance(found, Unavailable)
    assert "is `penstock serve` running at" in found.message
    assert not (tmp_path / "out").exists()


def test_an_unknown_transport(tmp_path: Path) -> None:
    assert "grpc, websocket" in problem(str(tmp_path), "-o", str(tmp_path), "--transport", "pigeon").message
