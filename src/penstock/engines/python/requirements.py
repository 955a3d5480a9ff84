"""Whether what a Python model's requirements.txt asks for is installed. Nothing is ever installed here."""

import codecs
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, urlsplit

from packaging.markers import Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

from penstock.core.errors import ConfigError

FILE = "requirements.txt"
_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_NESTED = re.compile(r"(?:-r|--requirement)(?:\s*=\s*|\s+|(?<=-r))(?P<file>\S.*)")
_EDITABLE = re.compile(r"(?:-e|--editable)(?:\s*=\s*|\s+)(?P<place>\S.*)")
_PLACE = re.compile(r"(?:[a-z+]+:|\.{1,2}$|\.{0,2}/|[^\s\[@]*\.(?:whl|zip|tar\.\w+)$)", re.I)  # a URL, a folder, a file


def check_requirements(model_file: Path) -> None:
    """Looks beside the model file and beside model.yaml; raises ConfigError with what is missing and what to do."""
    wrong: list[tuple[str, str]] = []  # what is missing, and the command that installs it
    for folder in (model_file.parent, model_file.parent.parent):
        file = folder / FILE
        if not file.is_file():
            continue
        if found := [problem for line, source in _lines(file, ()) if (problem := _problem(line, source))]:
            missing = f"{file}: the model needs packages that are not installed: {'; '.join(dict.fromkeys(found))}"
            wrong.append((missing, f"{sys.executable} -m pip install -r {file}"))
    if wrong:
        raise ConfigError(
            "\n".join(f"{missing}. Install them with: {install}" for missing, install in wrong),
            file=str(model_file),
            reason="missing_requirement",
            missing="\n".join(missing for missing, _ in wrong),
            install=" && ".join(install for _, install in wrong),
        )


def _lines(file: Path, within: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Each requirement and the file that has it, without comments, hashes and pip's own options."""
    if file.resolve() in (each.resolve() for each in within):
        return
    for line in _read(file, within).replace("\\\n", " ").splitlines():
        kept = re.split(r"(?:^|\s)#", line.strip(), maxsplit=1)[0].strip()
        if nested := _NESTED.fullmatch(kept):
            if "://" not in nested["file"]:
                yield from _lines(file.parent / nested["file"].strip(), (*within, file))
        elif editable := _EDITABLE.fullmatch(kept):
            if _name_at(editable["place"]):
                yield editable["place"], file
        elif kept and not kept.startswith("-"):
            yield re.split(r"\s--", kept, maxsplit=1)[0].strip(), file


def _read(file: Path, within: tuple[Path, ...]) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        asked = f" (it is asked for by {within[-1]})" if within else ""
        raise ConfigError(f"{file}: cannot be read: {error.strerror}{asked}", file=str(file)) from error
    encoding = next((name for bom, name in _BOMS.items() if data.startswith(bom)), "utf-8")
    # What is not text is in comments, or fails as a requirement.
    return data.decode(encoding, "replace").replace("\r\n", "\n")


def _problem(line: str, file: Path) -> str:
    """What is wrong; empty: the package is there."""
    if _PLACE.match(line):
        name = _name_at(line)
        return "" if not name or _installed(name) else line
    try:
        wanted = Requirement(line)
    except InvalidRequirement as error:
        raise ConfigError(f"{file}: '{line}' is no requirement", file=str(file)) from error
    return "; ".join(_missing(wanted, line))


def _name_at(place: str) -> str:
    """The name of what a URL, a folder or a file brings; empty where that does not tell."""
    parts = urlsplit(place)
    if named := parse_qs(parts.fragment).get("egg"):
        return named[0].split("[")[0]
    name = PurePosixPath(parts.path).name
    return name.split("-")[0] if name.endswith(".whl") else ""


def _missing(wanted: Requirement, line: str, extra: str = "", seen: frozenset[str] = frozenset()) -> list[str]:
    """Looks at what the extras ask for, too: a package is there without them, but not what the model needs of it."""
    if str(wanted) in seen or not _applies(wanted.marker, extra):
        return []
    named = f"{wanted.name}{wanted.specifier} (for {line})" if seen else line
    there = _installed(wanted.name)
    if not there:
        return [named]
    if not _fits(wanted, there):
        return [f"{named} ({there} is installed)"]
    found = []
    for name in sorted(wanted.extras):
        needed = (Requirement(text) for text in distribution(wanted.name).requires or ())
        for each in needed:
            if each.marker is not None and "extra" in str(each.marker):
                found += _missing(each, line, name, seen | {str(wanted)})
    return found


def _applies(marker: Marker | None, extra: str) -> bool:
    try:
        return marker is None or marker.evaluate({"extra": extra})
    except (UndefinedComparison, UndefinedEnvironmentName):
        return False


def _fits(wanted: Requirement, there: str) -> bool:
    try:
        return wanted.specifier.contains(there, prereleases=True)
    except InvalidVersion:  # it cannot be compared
        return False


def _installed(name: str) -> str:
    try:
        return distribution(name).version or ""
    except (PackageNotFoundError, ValueError, KeyError):
        return ""
