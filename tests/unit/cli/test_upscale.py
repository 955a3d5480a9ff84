"""Which files `penstock upscale` reads and writes."""

from pathlib import Path

import pytest

from penstock.cli.upscale import _named, _plan
from penstock.core.errors import InvalidRequest

A, B = Path("a.jpg"), Path("b.png")


def test_one_file_goes_where_it_is_told() -> None:
    assert _plan([A, B], None) == [(A, B)]


def test_one_file_may_go_into_a_folder(tmp_path: Path) -> None:
    assert _plan([A, tmp_path], None) == [(A, tmp_path / "a.png")]


def test_several_files_go_into_a_folder(tmp_path: Path) -> None:
    assert _plan([A, B], tmp_path) == [(A, tmp_path / "a.png"), (B, tmp_path / "b.png")]


def test_the_format_is_in_the_name(tmp_path: Path) -> None:
    assert _plan([A], tmp_path, "WEBP") == [(A, tmp_path / "a.webp")]
    assert _plan([A, tmp_path], None, "jpeg") == [(A, tmp_path / "a.jpeg")]
    assert [_named(Path(name)) for name in ("a.JPG", "a.webp", "a.png", "a")] == ["jpeg", "webp", "png", None]


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="rename one"):
        _plan([A, Path("other/a.png")], tmp_path)


@pytest.mark.parametrize("files", [[A], [A, B, A]])
def test_without_a_folder_there_is_one_input_and_one_output(files: list[Path]) -> None:
    with pytest.raises(InvalidRequest, match="say where to write"):
        _plan(files, None)
