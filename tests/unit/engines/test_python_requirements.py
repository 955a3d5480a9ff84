"""A Python model's requirements.txt is held against what is installed."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.engines.python_requirements import check_requirements
from tests.unit.engines.conftest import StartPython

NUMPY = version("numpy")


def model_file(folder: Path) -> Path:
    file = folder / "mine" / "1" / "model.py"
    file.parent.mkdir(parents=True)
    return file


@pytest.mark.parametrize("place", [".", ".."])
def test_what_is_there_is_fine(tmp_path: Path, place: str) -> None:
    file = model_file(tmp_path)
    (file.parent / place / "requirements.txt").write_text(
        "# all of this is there\n"
        "numpy>=1,<999  # any\n"
        f"NumPy=={NUMPY} \\\n    --hash=sha256:0000\n"
        "\n"
        "--index-url https://example.com\n"
        "-r more.txt\n"
        "nowhere-to-be-found; python_version < '3'\n"
    )
    check_requirements(file)


def test_no_file_asks_for_nothing(tmp_path: Path) -> None:
    check_requirements(model_file(tmp_path))


def test_what_is_missing_is_named_with_the_command(tmp_path: Path) -> None:
    file = model_file(tmp_path)
    wanted = file.parent / "requirements.txt"
    wanted.write_text("numpy>=999\npytest\nnowhere-to-be-found==1.0\n")
    with pytest.raises(ConfigError) as raised:
        check_requirements(file)
    assert raised.value.message == (
        f"{wanted}: the model needs packages that are not installed: numpy>=999 ({NUMPY} is installed); "
        f"nowhere-to-be-found==1.0. Install them with: {sys.executable} -m pip install -r {wanted}"
    )


def test_a_line_that_is_no_requirement(tmp_path: Path) -> None:
    file = model_file(tmp_path)
    (file.parent / "requirements.txt").write_text("what is this?\n")
    with pytest.raises(ConfigError, match="'what is this\\?' is no requirement"):
        check_requirements(file)


def test_a_model_without_them_is_not_started(start_python: StartPython, tmp_path: Path) -> None:
    described = [("X", "FP32", (-1,))]
    engine = start_python("raise SystemExit('started')", described, described)
    (tmp_path / "mine" / "requirements.txt").write_text("nowhere-to-be-found\n")
    with pytest.raises(ConfigError, match="nowhere-to-be-found"):
        engine.load()
