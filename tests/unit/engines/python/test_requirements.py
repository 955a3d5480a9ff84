"""The comparison of a Python model's requirements.txt with the installed packages."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.engines.python.requirements import check_requirements
from tests.unit.engines.python.conftest import StartPython

NUMPY = version("numpy")


def model_file(folder: Path) -> Path:
    file = folder / "mine" / "1" / "model.py"
    file.parent.mkdir(parents=True)
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return model_file(tmp_path)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder of installed packages, each with its metadata."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    install(folder, "Some.Thing", "2.0rc1")
    install(folder, "oddity", "built by hand")
    install(
        folder,
        "kit",
        "1.5+cpu",
        "numpy>=1",
        "nowhere; extra == 'never'",
        "some-thing>=2rc1; extra == 'half'",
        "some-thing>=9; extra == 'whole'",
        "kit[half,whole]; extra == 'all'",
        "kit[loop]; extra == 'loop'",
        "nowhere; extra == 'past' and python_version < '3'",
    )
    return folder


def install(folder: Path, name: str, number: str, *requires: str) -> None:
    place = folder / f"{name.replace('-', '_')}-{number.replace(' ', '_')}.dist-info"
    place.mkdir()
    lines = [f"Name: {name}", f"Version: {number}", *(f"Requires-Dist: {each}" for each in requires)]
    (place / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def problem(file: Path, text: str | bytes) -> str:
    """Return the problem without the text before and after it."""
    data = text.encode() if isinstance(text, str) else text
    (file.parent / "requirements.txt").write_bytes(data)
    try:
        check_requirements(file)
    except ConfigError as error:
        return error.message.partition("not installed: ")[2].partition(". Install them")[0] or error.message
    return ""


@pytest.mark.parametrize("place", [".", ".."])
def test_installed_requirements_are_fine(file: Path, place: str) -> None:
    (file.parent / place / "requirements.txt").write_text(
        "# all of this is there\n"
        "numpy>=1,<999  # any\n"
        f"NumPy=={NUMPY} \\\n    --hash=sha256:0000\n"
        "\n"
        "--index-url https://example.com\n"
        "-c constraints.txt\n"
        "-r https://example.com/more.txt\n"
        "nowhere-to-be-found; python_version < '3'\n"
    )
    check_requirements(file)


def test_a_missing_file_requires_nothing(file: Path) -> None:
    check_requirements(file)


def test_missing_packages_are_named_with_the_command_to_install_them(file: Path) -> None:
    wanted = file.parent / "requirements.txt"
    wanted.write_text("numpy>=999\npytest\nnowhere-to-be-found==1.0\n")
    with pytest.raises(ConfigError) as raised:
        check_requirements(file)
    assert raised.value.message == (
        f"{wanted}: the model needs packages that are not installed: numpy>=999 ({NUMPY} is installed); "
        f"nowhere-to-be-found==1.0. Install them with: {sys.executable} -m pip install -r {wanted}"
    )


def test_the_files_of_model_and_version_both_apply(file: Path) -> None:
    for folder, name in ((file.parent, "of-the-version"), (file.parent.parent, "of-the-model")):
        (folder / "requirements.txt").write_text(f"numpy\n{name}\n")
    with pytest.raises(ConfigError) as raised:
        check_requirements(file)
    of_version, of_model = raised.value.message.splitlines()
    assert f"of-the-version. Install them with: {sys.executable}" in of_version
    assert of_model.endswith(f"-r {file.parent.parent / 'requirements.txt'}")


@pytest.mark.parametrize("line", ["what is this?", "numpy>>1", "pip install numpy", "numpy 2"])
def test_a_line_that_is_not_a_requirement_is_reported(file: Path, line: str) -> None:
    assert f"'{line}' is not a valid requirement" in problem(file, f"{line}\n")


@pytest.mark.parametrize(
    "line", ["-r more.txt", "-rmore.txt", "-r  more.txt  # these", "--requirement more.txt", "--requirement=more.txt"]
)
def test_included_files_are_read(file: Path, line: str) -> None:
    (file.parent / "more.txt").write_text("numpy\n-r deeper/still.txt\nmissing-one\n")
    (file.parent / "deeper").mkdir()
    (file.parent / "deeper/still.txt").write_text("missing-two\n-r ../more.txt\n-r still.txt\n")
    assert problem(file, f"numpy\n{line}\n") == "missing-two; missing-one"


def test_a_missing_included_file_is_reported_with_the_file_that_includes_it(file: Path) -> None:
    asks = file.parent / "requirements.txt"
    said = problem(file, "-r nowhere.txt\n")
    assert (
        said == f"{file.parent / 'nowhere.txt'}: cannot be read: No such file or directory (it is included by {asks})"
    )


@pytest.mark.parametrize("name", ["some-thing", "Some_Thing", "SOME.thing", "some--thing"])
def test_package_names_are_normalized(file: Path, packages: Path, name: str) -> None:
    assert problem(file, f"{name}\n") == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("some-thing>=2.0rc1", ""),
        ("some-thing>=1", ""),
        ("some-thing>=2.0", "some-thing>=2.0 (2.0rc1 is installed)"),
        ("some-thing==2.0rc1", ""),
        ("kit==1.5", ""),
        ("kit==1.5+gpu", "kit==1.5+gpu (1.5+cpu is installed)"),
        ("oddity", ""),
        ("oddity>=3", "oddity>=3 (built by hand is installed)"),
        ("kit ~= 1.4 ; sys_platform == 'linux'", ""),
        ("nowhere; sys_platform == 'win32'", ""),
        ("nowhere; extra == 'x'", ""),
    ],
)
def test_versions_and_markers_are_checked(file: Path, packages: Path, line: str, said: str) -> None:
    assert problem(file, f"{line}\n") == said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kit[half]", ""),
        ("kit[whole]", "some-thing>=9 (for kit[whole]) (2.0rc1 is installed)"),
        ("kit[all]>=1", "some-thing>=9 (for kit[all]>=1) (2.0rc1 is installed)"),
        ("kit[loop,past,unknown]", ""),
        ("nowhere[half]", "nowhere[half]"),
    ],
)
def test_requirements_of_extras_are_checked(file: Path, packages: Path, line: str, said: str) -> None:
    assert problem(file, f"{line}\n") == said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("numpy @ https://example.com/numpy-1.0.tar.gz", ""),
        ("nowhere @ git+https://example.com/nowhere.git@v1", "nowhere @ git+https://example.com/nowhere.git@v1"),
        ("git+https://example.com/n.git@main#egg=numpy", ""),
        ("-e git+ssh://git@example.com/n.git#egg=nowhere[x]", "git+ssh://git@example.com/n.git#egg=nowhere[x]"),
        ("https://example.com/nowhere-1.0-py3-none-any.whl", "https://example.com/nowhere-1.0-py3-none-any.whl"),
        ("https://example.com/numpy-1.0-py3-none-any.whl#sha256=00", ""),
        ("./wheels/nowhere-1.0-py3-none-any.whl", "./wheels/nowhere-1.0-py3-none-any.whl"),
        ("nowhere-1.0.tar.gz", ""),
        ("-e .", ""),
        ("../shared", ""),
        ("https://example.com/archive/main.zip", ""),
    ],
)
def test_urls_and_folders_are_checked_by_the_name_in_them(file: Path, line: str, said: str) -> None:
    assert problem(file, f"{line}\n") == said


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_files_with_other_encodings_and_line_ends_are_read(file: Path, encoding: str) -> None:
    text = "numpy\r\nmissing-one  # é\r\nnumpy \\\r\n  >= 1\r\n"
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    assert problem(file, (mark + text).encode(encoding)) == "missing-one"


def test_undecodable_bytes_in_a_comment_are_ignored(file: Path) -> None:
    assert problem(file, b"# caf\xe9\nnumpy\nmissing-one\n") == "missing-one"
    assert "is not a valid requirement" in problem(file, b"caf\xe9\n")


def test_a_model_without_its_requirements_is_not_started(start_python: StartPython, tmp_path: Path) -> None:
    described = [("X", "FP32", (-1,))]
    engine = start_python("raise SystemExit('started')", described, described)
    (tmp_path / "mine" / "requirements.txt").write_text("nowhere-to-be-found\n")
    with pytest.raises(ConfigError, match="nowhere-to-be-found"):
        engine.load()
