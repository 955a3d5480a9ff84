"""Checks a model's folder without loading the model: its name, model.yaml and version folders."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.yaml_file import parse_yaml, validate_yaml
from penstock.models.check.findings import (
    Finding,
    command,
    dangling_link,
    has_problem,
    outside_link,
    unreadable,
    warning,
)
from penstock.models.check.version_files import examine_files, explain_missing_file, is_model_file
from penstock.models.folder import MODEL_ONLY, NAME, VERSION_FILE, choose_versions, is_outside
from penstock.models.model_yaml import DEFAULT_FILES, ModelSettings

SETTINGS_FILE = "model.yaml"
NOT_SETTINGS = ("model.yml", "Model.yaml", "config.yaml", "config.yml", "config.pbtxt", "model-settings.json")
NOT_VERSION_FILES = (SETTINGS_FILE, "requirements.txt", "README.md", "LICENSE", ".gitignore")
# By the reason of a settings error: the finding's code and advice.
_SETTINGS_ADVICE = {
    "invalid_yaml": (
        "invalid_yaml",
        "Correct this line. YAML needs 'key: value', and spaces, not tabs, before the keys of a section.",
    ),
    "unknown_key": ("unknown_key", "Correct or remove the key; docs/configuration.md lists all keys."),
    "invalid_value": ("invalid_value", "Correct the value; docs/configuration.md describes the values of each key."),
    "python_tensors": (
        "invalid_value",
        "Declare its inputs and outputs, for example\n"
        "python:\n"
        "  inputs: [{name: X, datatype: FP32, shape: [-1]}]\n"
        "  outputs: [{name: Y, datatype: FP32, shape: [-1]}]",
    ),
}


@dataclass(slots=True)
class Layout:
    path: Path
    settings: ModelSettings | None = None
    versions: tuple[str, ...] = ()  # the versions that would be served
    findings: list[Finding] = field(default_factory=list)


def examine_folder(path: Path) -> Layout:
    """Check the model's folder, settings and files without running the model."""
    layout = Layout(path)
    try:
        _examine(layout)
    except OSError as error:
        layout.findings.append(unreadable(Path(error.filename or path), error))
    return layout


def _examine(layout: Layout) -> None:
    path, found = layout.path, layout.findings
    found += _examine_name(path)
    children = sorted(path.iterdir())
    settings_file = path / SETTINGS_FILE
    settings: ModelSettings | None = ModelSettings()
    if not settings_file.is_file():
        found.append(_no_settings_finding(path, children))
    elif is_outside(settings_file, path):
        found.append(outside_link(settings_file))
        return
    else:
        settings, faults = validate_yaml(settings_file, ModelSettings)
        found += _explain_faults(faults)
    guessed = _read_valid_settings(settings_file) if settings is None else settings
    layout.settings = settings
    layout.versions = _examine_versions(layout, guessed, children)


def looks_like_a_model(path: Path) -> bool:
    """Return whether a folder without model.yaml seems to be a model, as it has version folders or model files."""
    try:
        children = list(path.iterdir())
        return any(is_model_file(child) or (child.is_dir() and _parse_version(child.name)) for child in children)
    except OSError:
        return True  # the check reports that it is unreadable


def _examine_name(path: Path) -> list[Finding]:
    if NAME.match(path.name):
        return []
    better = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-._")[:128]
    advice = f"Rename it: {command('mv', path, path.with_name(better))}" if better else "Rename the folder."
    rule = "letters, digits, '.', '_' and '-', at most 128, a letter or digit first"
    message = f"'{path.name}' is not a valid model name: {rule}"
    return [Finding("bad_name", message, advice)]


def _no_settings_finding(path: Path, children: Iterable[Path]) -> Finding:
    file = path / SETTINGS_FILE
    if file.is_symlink():
        return dangling_link(file)
    near = next((child.name for child in children if child.name in NOT_SETTINGS), "")
    advice = f"Create it. For an ONNX model with tensors, an empty file is enough: {command('touch', file)}"
    if near in ("model.yml", "Model.yaml"):
        advice = f"Rename {near}: {command('mv', path / near, file)}"
    elif near:
        advice = f"{near} belongs to another server. {advice}"
    return Finding("no_settings", f"{path} has no {SETTINGS_FILE}, so it is not served", advice)


def _explain_faults(faults: Iterable[ConfigError]) -> list[Finding]:
    by_line = sorted(faults, key=lambda fault: (fault.fields["file"], int(fault.fields.get("line", 0))))
    return [_explain_fault(fault) for fault in by_line]


def _explain_fault(fault: ConfigError) -> Finding:
    if fault.reason == "unreadable":
        path, cause = Path(fault.fields["file"]), fault.__cause__
        if isinstance(cause, OSError):
            return unreadable(path, cause)
        return Finding("unreadable", f"{path} is not text", "Save the file as UTF-8.")
    code, advice = _SETTINGS_ADVICE[fault.reason]
    return Finding(code, fault.message, advice)


def _read_valid_settings(file: Path) -> ModelSettings:
    """Return the valid keys of an invalid model.yaml, from which the check knows which files to expect."""
    import yaml

    try:
        document: Any = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return ModelSettings()
    given = document if isinstance(document, dict) else {}
    valid = {key: str(given[key]) for key in ("task", "engine", "file") if key in given}
    valid.setdefault("file", DEFAULT_FILES.get(valid.get("engine", ""), "model.onnx"))
    return ModelSettings.model_construct(**valid)  # type: ignore[arg-type]


def _examine_versions(layout: Layout, settings: ModelSettings, children: list[Path]) -> tuple[str, ...]:
    """Check the version folders, and return the versions that would be served."""
    path, found = layout.path, layout.findings
    folders = [child for child in children if child.is_dir() and not child.name.startswith((".", "__"))]
    outside = [child for child in folders if is_outside(child, path)]
    folders = [child for child in folders if child not in outside]
    found += [outside_link(child) for child in outside if _parse_version(child.name)]
    numbers = sorted(int(child.name) for child in folders if _parse_version(child.name) == child.name)
    named = {number: _read_version_settings(layout, settings, number) for number in numbers}
    present = [number for number in numbers if os.path.isfile(path / str(number) / named[number].file)]
    wrong = [child for child in folders if child not in [path / str(number) for number in numbers]]
    chosen = choose_versions(settings, present)
    found += [_version_name_finding(child, numbers, bool(present)) for child in wrong if _contains_model(child)]
    found += _check_listed_versions(settings, present, path)
    if not present and not numbers and not has_problem(f for f in found if f.code in ("version_name", "outside_link")):
        found.append(_no_version_finding(path, settings, children))
    for number in numbers:
        if number not in present and (not chosen or number > chosen[-1]) and settings.versions in ("latest", "all"):
            found.append(_missing_file_finding(path, number, named[number], chosen))
    for number in chosen:
        folder = path / str(number)
        links = [each for each in sorted(folder.rglob("*")) if each.is_symlink() and not each.name.startswith(".")]
        linked = [outside_link(each) for each in links if is_outside(each, path)]
        found += [replace(each, version=str(number)) for each in linked or examine_files(folder, named[number])]
    return tuple(str(number) for number in chosen)


def _read_version_settings(layout: Layout, settings: ModelSettings, number: int) -> ModelSettings:
    file = layout.path / str(number) / VERSION_FILE
    is_sound = layout.settings is not None and not any(found.code in _SETTINGS_ADVICE for found in layout.findings)
    if not file.is_file() or not is_sound or is_outside(file, layout.path):
        return settings
    found, faults = validate_yaml(file, ModelSettings, layout.path / SETTINGS_FILE, MODEL_ONLY)
    layout.findings += [replace(found, version=str(number)) for found in _explain_faults(faults)]
    return found or settings


def _missing_file_finding(path: Path, number: int, settings: ModelSettings, chosen: list[int]) -> Finding:
    finding = replace(explain_missing_file(path / str(number), settings), version=str(number))
    if chosen:
        message = f"{finding.message}; version {chosen[-1]} is served instead"
        return replace(finding, message=message, is_warning=True)
    return finding


def _version_name_finding(child: Path, numbers: list[int], has_version: bool) -> Finding:
    number = _parse_version(child.name)
    if not number or int(number) in numbers:
        number = str(max(numbers, default=0) + 1)
    message = f"{child} is not a version: the name of a version's folder is a whole number from 1, such as 1, 2 or 10"
    code = "version_ignored" if has_version else "version_name"
    return Finding(code, message, f"Rename it: {command('mv', child, child.with_name(number))}", is_warning=has_version)


def _parse_version(name: str) -> str:
    """Return the number in a folder's name, for example "1" for v1, 01 and version-1, or an empty text."""
    match = re.fullmatch(r"(?:v|ver|version)?[-_.]?0*([0-9]+)(?:\.0)*", name.lower())
    if match is None:
        return "1" if name.lower() in ("latest", "current", "default") else ""
    return str(int(match[1]) or 1)


def _contains_model(folder: Path) -> bool:
    try:
        return bool(_parse_version(folder.name)) or any(is_model_file(child) for child in folder.iterdir())
    except OSError:
        return False


def _no_version_finding(path: Path, settings: ModelSettings, children: list[Path]) -> Finding:
    target = path / "1"
    beside = [child for child in children if child.name not in NOT_VERSION_FILES and not child.is_dir()]
    if any(is_model_file(child) or child.name == settings.file for child in beside):
        names = ", ".join(child.name for child in beside)
        message = f"{path} has no version folder; beside {SETTINGS_FILE} there is {names}"
        advice = f"Create the folder: {command('mkdir', target)} && {command('mv', *beside, f'{target}/')}"
        return Finding("no_version", message, advice)
    message = f"{path} has no version folder: expected {target / settings.file}"
    return Finding(
        "no_version", message, f"Create the folder, and put the model's file there: {command('mkdir', target)}"
    )


def _check_listed_versions(settings: ModelSettings, present: list[int], path: Path) -> list[Finding]:
    if isinstance(settings.versions, str):
        return []
    there = ", ".join(str(number) for number in present) or "none"
    if missing := sorted(set(settings.versions) - set(present)):
        listed = ", ".join(str(number) for number in missing)
        message = (
            f"{path / SETTINGS_FILE}: versions lists {listed}, but the versions with a {settings.file} are: {there}"
        )
        return [Finding("missing_version", message, f"Remove {listed} from versions, or add the version's folder.")]
    if present and present[-1] not in settings.versions:
        message = f"version {present[-1]} exists, but versions lists only {', '.join(map(str, settings.versions))}"
        return [warning("version_not_served", message, f"Add {present[-1]} to versions, or set versions: latest.")]
    return []
