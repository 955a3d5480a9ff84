"""A model's folder, looked at without loading anything: its name, its model.yaml, its version folders."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.yaml_file import examine_yaml, parse_yaml
from penstock.models.check.files import examine_files, explain_missing_file, is_model_file
from penstock.models.check.findings import Finding, command, dangling_link, has_problem, unreadable, warning
from penstock.models.folder import MODEL_ONLY, NAME, VERSION_FILE, choose_versions
from penstock.models.settings import DEFAULT_FILES, ModelSettings

SETTINGS_FILE = "model.yaml"
NOT_SETTINGS = ("model.yml", "Model.yaml", "config.yaml", "config.yml", "config.pbtxt", "model-settings.json")
NOT_OF_A_VERSION = (SETTINGS_FILE, "requirements.txt", "README.md", "LICENSE", ".gitignore")
# What is wrong with a settings file: an error's reason, the finding's code, and what to do.
_SETTINGS_ADVICE = {
    "invalid_yaml": (
        "invalid_yaml",
        "Correct that line; YAML wants 'key: value', and spaces (no tabs) before the keys of a section.",
    ),
    "unknown_key": ("unknown_key", "Correct the name or take it out; docs/configuration.md lists all keys."),
    "invalid_value": ("invalid_value", "docs/configuration.md says what each key may be."),
    "python_tensors": (
        "invalid_value",
        "Say what it takes and gives, as in\n"
        "python:\n"
        "  inputs: [{name: X, datatype: FP32, shape: [-1]}]\n"
        "  outputs: [{name: Y, datatype: FP32, shape: [-1]}]",
    ),
}


@dataclass(slots=True)
class Layout:
    path: Path
    settings: ModelSettings | None = None
    versions: tuple[str, ...] = ()  # those that would be served
    findings: list[Finding] = field(default_factory=list)


def examine_folder(path: Path) -> Layout:
    """All that can be told without running the model."""
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
        found.append(_no_settings(path, children))
    else:
        settings, faults = examine_yaml(settings_file, ModelSettings)
        found += _explain_faults(faults)
    guessed = _guess(settings_file) if settings is None else settings
    layout.settings = settings
    layout.versions = _examine_versions(layout, guessed, children)


def looks_like_a_model(path: Path) -> bool:
    """A folder that somebody meant for one: it has version folders, or model files."""
    try:
        children = list(path.iterdir())
        return any(is_model_file(child) or (child.is_dir() and _version_of(child.name)) for child in children)
    except OSError:
        return True  # nobody can tell, and that is worth a word


def _examine_name(path: Path) -> list[Finding]:
    if NAME.match(path.name):
        return []
    better = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-._")[:128]
    advice = f"Rename it: {command('mv', path, path.with_name(better))}" if better else "Rename the folder."
    message = f"'{path.name}' is no model name: letters, digits, '.', '_' and '-', at most 128, a letter or digit first"
    return [Finding("bad_name", message, advice)]


def _no_settings(path: Path, children: Iterable[Path]) -> Finding:
    file = path / SETTINGS_FILE
    if file.is_symlink():
        return dangling_link(file)
    near = next((child.name for child in children if child.name in NOT_SETTINGS), "")
    advice = f"Make one. For an ONNX model that takes and gives tensors an empty file will do: {command('touch', file)}"
    if near in ("model.yml", "Model.yaml"):
        advice = f"Rename {near}: {command('mv', path / near, file)}"
    elif near:
        advice = f"{near} is of another server. {advice}"
    return Finding("no_settings", f"{path} has no {SETTINGS_FILE}, so it is not served", advice)


def _explain_faults(faults: Iterable[ConfigError]) -> list[Finding]:
    by_line = sorted(faults, key=lambda fault: (fault.fields["file"], int(fault.fields.get("line", 0))))
    return [_explain_fault(fault) for fault in by_line]


def _explain_fault(fault: ConfigError) -> Finding:
    if fault.reason == "unreadable":
        path, cause = Path(fault.fields["file"]), fault.__cause__
        if isinstance(cause, OSError):
            return unreadable(path, cause)
        return Finding("unreadable", f"{path} is not UTF-8 text: {cause}", "Save it as UTF-8.")
    code, advice = _SETTINGS_ADVICE[fault.reason]
    return Finding(code, fault.message, advice)


def _guess(file: Path) -> ModelSettings:
    """As much of settings that make no sense together as says which files there should be."""
    import yaml

    try:
        document: Any = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return ModelSettings()
    given = document if isinstance(document, dict) else {}
    told = {key: str(given[key]) for key in ("task", "engine", "file") if key in given}
    told.setdefault("file", DEFAULT_FILES.get(told.get("engine", ""), "model.onnx"))
    return ModelSettings.model_construct(**told)  # type: ignore[arg-type]


def _examine_versions(layout: Layout, settings: ModelSettings, children: list[Path]) -> tuple[str, ...]:
    """The versions that would be served."""
    path, found = layout.path, layout.findings
    folders = [child for child in children if child.is_dir() and not child.name.startswith((".", "__"))]
    numbers = sorted(int(child.name) for child in folders if _version_of(child.name) == child.name)
    named = {number: _version_settings(layout, settings, number) for number in numbers}
    present = [number for number in numbers if os.path.isfile(path / str(number) / named[number].file)]
    wrong = [child for child in folders if child not in [path / str(number) for number in numbers]]
    chosen = choose_versions(settings, present)
    found += [_misnamed(child, numbers, bool(present)) for child in wrong if _holds_a_model(child)]
    found += _unpinned(settings, present, path)
    if not present and not numbers and not has_problem(f for f in found if f.code == "version_name"):
        found.append(_no_version(path, settings, children))
    for number in numbers:
        if number not in present and (not chosen or number > chosen[-1]) and settings.versions in ("latest", "all"):
            found.append(_missing_file(path, number, named[number], chosen))
    for number in chosen:
        folder = path / str(number)
        found += [replace(each, version=str(number)) for each in examine_files(folder, named[number])]
    return tuple(str(number) for number in chosen)


def _version_settings(layout: Layout, settings: ModelSettings, number: int) -> ModelSettings:
    file = layout.path / str(number) / VERSION_FILE
    is_sound = layout.settings is not None and not any(found.code in _SETTINGS_ADVICE for found in layout.findings)
    if not file.is_file() or not is_sound:
        return settings
    found, faults = examine_yaml(file, ModelSettings, layout.path / SETTINGS_FILE, MODEL_ONLY)
    layout.findings += [replace(found, version=str(number)) for found in _explain_faults(faults)]
    return found or settings


def _missing_file(path: Path, number: int, settings: ModelSettings, chosen: list[int]) -> Finding:
    finding = replace(explain_missing_file(path / str(number), settings), version=str(number))
    if chosen:
        message = f"{finding.message}; version {chosen[-1]} is served in its place"
        return replace(finding, message=message, is_warning=True)
    return finding


def _misnamed(child: Path, numbers: list[int], has_version: bool) -> Finding:
    number = _version_of(child.name)
    if not number or int(number) in numbers:
        number = str(max(numbers, default=0) + 1)
    message = f"{child} is not taken for a version: a version's folder is a whole number from 1 on, as in 1, 2, 10"
    code = "version_ignored" if has_version else "version_name"
    return Finding(code, message, f"Rename it: {command('mv', child, child.with_name(number))}", is_warning=has_version)


def _version_of(name: str) -> str:
    """The number that a folder's name means: 1 of v1, 01, version-1."""
    told = re.fullmatch(r"(?:v|ver|version)?[-_.]?0*([0-9]+)(?:\.0)*", name.lower())
    if told is None:
        return "1" if name.lower() in ("latest", "current", "default") else ""
    return str(int(told[1]) or 1)


def _holds_a_model(folder: Path) -> bool:
    try:
        return bool(_version_of(folder.name)) or any(is_model_file(child) for child in folder.iterdir())
    except OSError:
        return False


def _no_version(path: Path, settings: ModelSettings, children: list[Path]) -> Finding:
    target = path / "1"
    beside = [child for child in children if child.name not in NOT_OF_A_VERSION and not child.is_dir()]
    if any(is_model_file(child) or child.name == settings.file for child in beside):
        names = ", ".join(child.name for child in beside)
        message = f"{path} has no version folder; beside {SETTINGS_FILE} there is {names}"
        advice = f"Make one: {command('mkdir', target)} && {command('mv', *beside, f'{target}/')}"
        return Finding("no_version", message, advice)
    message = f"{path} has no version folder: expected {target / settings.file}"
    return Finding("no_version", message, f"Make one and put the model's file there: {command('mkdir', target)}")


def _unpinned(settings: ModelSettings, present: list[int], path: Path) -> list[Finding]:
    if isinstance(settings.versions, str):
        return []
    there = ", ".join(str(number) for number in present) or "none"
    if missing := sorted(set(settings.versions) - set(present)):
        told = ", ".join(str(number) for number in missing)
        message = f"{path / SETTINGS_FILE}: versions asks for {told}; with a {settings.file} there are: {there}"
        return [Finding("missing_version", message, "Take it out of versions, or put the version's folder there.")]
    if present and present[-1] not in settings.versions:
        message = f"version {present[-1]} is there, but versions pins {', '.join(map(str, settings.versions))}"
        return [warning("version_not_served", message, "Add it to versions, or say versions: latest.")]
    return []
