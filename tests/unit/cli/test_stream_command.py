"""Frames that `penstock stream` accepts, and its errors."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import stream_command
from penstock.cli.stream_command import find_frames
from penstock.core.errors import InvalidRequest, PenstockError, Unavailable
from penstock.terminal.media import _write_result

NOBODY = "127.0.0.1:1"


def problem(*arguments: str) -> PenstockError:
    app = typer.Typer()
    app.command()(stream_command.stream)
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, PenstockError), result.output
    return result.exception


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")


def test_frames_keep_their_order_and_folders_are_sorted_by_name(tmp_path: Path) -> None:
    touch(tmp_path / "shot", "2.png", "1.JPG", "10.jpeg", "notes.txt")
    touch(tmp_path, "last.png", "first.png")
    given = [tmp_path / "first.png", tmp_path / "shot", tmp_path / "last.png"]
    assert [file.name for file in find_frames(given)] == ["first.png", "1.JPG", "2.png", "10.jpeg", "last.png"]


def test_missing_frames_are_reported(tmp_path: Path) -> None:
    touch(tmp_path / "empty", "notes.txt")
    with pytest.raises(InvalidRequest, match="no such file"):
        find_frames([tmp_path / "none.png"])
    with pytest.raises(InvalidRequest, match="files in this folder"):
        find_frames([tmp_path / "empty"])


def test_output_files_are_numbered_and_named_after_their_format(tmp_path: Path) -> None:
    for number, data in enumerate((b"\x89PNG...", b"\xff\xd8...", b"?"), start=1):
        _write_result(tmp_path / "out", number, data)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["000001.png", "000002.jpg", "000003.bin"]


@pytest.mark.parametrize("transport", ["grpc", "websocket"])
def test_stream_reports_a_missing_server(tmp_path: Path, transport: str) -> None:
    touch(tmp_path, "a.png")
    found = problem(str(tmp_path / "a.png"), "-o", str(tmp_path / "out"), "--transport", transport, "--server", NOBODY)
    assert isinstance(found, Unavailable)
    assert "is `penstock serve` running at" in found.message
    assert not (tmp_path / "out").exists()


def test_an_unknown_transport_is_refused(tmp_path: Path) -> None:
    assert "grpc, websocket" in problem(str(tmp_path), "-o", str(tmp_path), "--transport", "pigeon").message
