"""Files that `penstock upscale` reads and writes."""

from pathlib import Path

import pytest

from penstock.cli.upscale_command import _find_format, _plan_files
from penstock.core.errors import InvalidRequest

A, B = Path("a.jpg"), Path("b.png")


def test_one_file_is_written_to_the_given_path() -> None:
    assert _plan_files([A, B], None) == [(A, B)]


def test_one_file_can_be_written_to_a_folder(tmp_path: Path) -> None:
    assert _plan_files([A, tmp_path], None) == [(A, tmp_path / "a.png")]


def test_several_files_are_written_to_a_folder(tmp_path: Path) -> None:
    assert _plan_files([A, B], tmp_path) == [(A, tmp_path / "a.png"), (B, tmp_path / "b.png")]


def test_the_format_follows_from_the_output_name(tmp_path: Path) -> None:
    assert _plan_files([A], tmp_path, "WEBP") == [(A, tmp_path / "a.webp")]
    assert _plan_files([A, tmp_path], None, "jpeg") == [(A, tmp_path / "a.jpeg")]
    assert [_find_format(Path(name)) for name in ("a.JPG", "a.webp", "a.png", "a")] == ["jpeg", "webp", "png", None]


def test_an_output_whose_name_promises_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"b\.gif: cannot write \.gif files; choose \.png, \.jpg"):
        _plan_files([A, Path("b.gif")], None)
    assert _plan_files([A, Path("b.gif")], None, "png") == [(A, Path("b.gif"))]


def test_two_files_with_the_same_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="rename one"):
        _plan_files([A, Path("other/a.png")], tmp_path)


@pytest.mark.parametrize("files", [[A], [A, B, A]])
def test_without_a_folder_only_one_input_and_one_output_are_accepted(files: list[Path]) -> None:
    with pytest.raises(InvalidRequest, match="expected two files"):
        _plan_files(files, None)
