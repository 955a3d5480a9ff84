"""Checks that the packages in a Python model's requirements.txt are installed; never installs anything."""

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
    """Check requirements.txt beside the model file and beside model.yaml; raise ConfigError if packages are missing."""
    wrong: list[tuple[str, str]] = []  # missing packages, and the command that installs them
    for folder in (model_file.parent, model_file.parent.parent):
        file = folder / FILE
        if not file.is_file():
            continue
        if found := [
            problem for line, source in _iterate_requirements(file, ()) if (problem := _find_missing(line, source))
        ]:
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


def _iterate_requirements(file: Path, within: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Yield each requirement in a file and in the files that it includes, without comments, hashes and options."""
    if file.resolve() in (each.resolve() for each in within):
        return
    for line in _read_text(file, within).replace("\\\n", " ").splitlines():
        kept = re.split(r"(?:^|\s)#", line.strip(), maxsplit=1)[0].strip()
        if nested := _NESTED.fullmatch(kept):
            if "://" not in nested["file"]:
                yield from _iterate_requirements(file.parent / nested["file"].strip(), (*within, file))
        elif editable := _EDITABLE.fullmatch(kept):
            if _package_name(editable["place"]):
                yield editable["place"], file
        elif kept and not kept.startswith("-"):
            yield re.split(r"\s--", kept, maxsplit=1)[0].strip(), file


def _read_text(file: Path, within: tuple[Path, ...]) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        asked = f" (it is included by {within[-1]})" if within else ""
        raise ConfigError(f"{file}: cannot be read: {error.strerror}{asked}", file=str(file)) from error
    encoding = next((name for bom, name in _BOMS.items() if data.startswith(bom)), "utf-8")
    # Bytes that cannot be decoded are in a comment, or make the requirement invalid.
    return data.decode(encoding, "replace").replace("\r\n", "\n")


def _find_missing(line: str, file: Path) -> str:
    """Return the packages that are missing for one line of requirements.txt, or an empty text."""
    if _PLACE.match(line):
        name = _package_name(line)
        return "" if not name or _installed_version(name) else line
    try:
        wanted = Requirement(line)
    except InvalidRequirement as error:
        raise ConfigError(
            f"{file}: '{line}' is not a valid requirement; write it like 'numpy>=2'", file=str(file)
        ) from error
    return "; ".join(_missing_packages(wanted, line))


def _package_name(location: str) -> str:
    """Return the package name in a URL, folder or file name, or an empty text if the name does not show it."""
    parts = urlsplit(location)
    if named := parse_qs(parts.fragment).get("egg"):
        return named[0].split("[")[0]
    name = PurePosixPath(parts.path).name
    return name.split("-")[0] if name.endswith(".whl") else ""


def _missing_packages(
    requirement: Requirement, line: str, extra: str = "", seen: frozenset[str] = frozenset()
) -> list[str]:
    """Return the packages that are missing for a requirement, including those for its extras (`name[extra]`)."""
    if str(requirement) in seen or not _marker_applies(requirement.marker, extra):
        return []
    named = f"{requirement.name}{requirement.specifier} (for {line})" if seen else line
    installed = _installed_version(requirement.name)
    if not installed:
        return [named]
    if not _version_fits(requirement, installed):
        return [f"{named} ({installed} is installed)"]
    found = []
    for name in sorted(requirement.extras):
        needed = (Requirement(text) for text in distribution(requirement.name).requires or ())
        for each in needed:
            if each.marker is not None and "extra" in str(each.marker):
                found += _missing_packages(each, line, name, seen | {str(requirement)})
    return found


def _marker_applies(marker: Marker | None, extra: str) -> bool:
    try:
        return marker is None or marker.evaluate({"extra": extra})
    except (UndefinedComparison, UndefinedEnvironmentName):
        return False


def _version_fits(requirement: Requirement, installed: str) -> bool:
    try:
        return requirement.specifier.contains(installed, prereleases=True)
    except InvalidVersion:  # the version cannot be compared
        return False


def _installed_version(name: str) -> str:
    try:
        return distribution(name).version or ""
    except (PackageNotFoundError, ValueError, KeyError):
        return ""
