"""Checks models: finds their folders, and warns about settings that do not suit the model or the machine."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.models.building import takes_texts
from penstock.models.check.findings import Finding, as_json, warning
from penstock.models.check.layout import SETTINGS_FILE, examine_folder, looks_like_a_model
from penstock.models.check.trial_process import try_version
from penstock.models.folder import version_settings
from penstock.models.model_yaml import ModelSettings
from penstock.tasks.built_in import BUILT_IN
from penstock.tasks.options import TaskSettings
from penstock.telemetry.control_groups import count_usable_cores

# Problems with the task's files. The network can be tried in spite of them.
TASK_FILE_PROBLEMS = {"missing_tokenizer", "invalid_tokenizer", "missing_labels", "invalid_labels"}
TASK_SECTIONS = tuple(name for name in BUILT_IN if name in TaskSettings.model_fields)
ENGINE_SECTIONS = ("python", "torch", "tensorrt")


def examine_fit(settings: ModelSettings) -> list[Finding]:
    return [*_check_threads(settings), *_check_token_budget(settings), *_check_unused_sections(settings)]


def examine_precision(settings: ModelSettings, facts: Mapping[str, object]) -> list[Finding]:
    """Compare the requested precision with the precision of the loaded model."""
    asked, runs = settings.precision, facts.get("precision")
    if asked == "auto" or runs in (None, asked, "custom"):
        return []
    message = f"precision is {asked}, but the model runs in {runs}"
    advice = "Set precision: auto. With engine: onnx the file decides; docs/quantization.md tells how to convert it."
    return [warning("precision_differs", message, advice)]


def _check_threads(settings: ModelSettings) -> Iterator[Finding]:
    cores = count_usable_cores()
    instances = settings.instances
    count = settings.instance_count()
    if instances.device in ("cpu", "auto") and count * instances.threads > cores:
        message = (
            f"{count} instance{'s' if count > 1 else ''} of {instances.threads} "
            f"thread{'s' if instances.threads > 1 else ''} are more than this machine's {cores} cores"
        )
        advice = (
            "Set instances.count: auto, because instances would wait for cores; penstock tune finds the best number."
        )
        yield warning("too_many_threads", message, advice)


def _check_token_budget(settings: ModelSettings) -> Iterator[Finding]:
    longest = settings.max_length if takes_texts(settings) else 0
    budget = settings.batching.max_tokens
    if budget is not None and budget < longest:
        message = f"batching.max_tokens {budget} is less than {settings.task}.max_length {longest}"
        advice = "Raise max_tokens, or lower max_length: a longer text is always a batch of its own."
        yield warning("low_token_budget", message, advice)


def _check_unused_sections(settings: ModelSettings) -> Iterator[Finding]:
    given = settings.model_fields_set
    for sections, key, value in ((TASK_SECTIONS, "task", settings.task), (ENGINE_SECTIONS, "engine", settings.engine)):
        for section in sections:
            if section in given and section != value:
                message = f"the section {section}: has no effect with {key}: {value}"
                yield warning("unused_settings", message, f"Remove it, or set {key}: {section}.")


def find_models(path: Path) -> list[Path]:
    """Return `path` if it is a model folder, or all model folders in it if it is a repository.

    Raise ConfigError if it is neither.
    """
    if path.name in ("", ".."):
        path = path.resolve()
    if not path.is_dir():
        raise ConfigError(_explain_no_folder(path))
    if os.path.lexists(path / SETTINGS_FILE):
        return [path]
    if os.path.isfile(path.parent / SETTINGS_FILE):
        raise ConfigError(f"{path} is a version's folder; give the model's folder: penstock model check {path.parent}")
    try:
        children = [child for child in sorted(path.iterdir()) if child.is_dir() and not child.name.startswith(".")]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    models = [child for child in children if os.path.lexists(child / SETTINGS_FILE)]
    if not models and looks_like_a_model(path):
        return [path]
    models += [child for child in children if child not in models and looks_like_a_model(child)]
    if not models:
        raise ConfigError(f"{path}: neither a model's folder (with {SETTINGS_FILE}) nor a repository of models")
    return sorted(models)


def _explain_no_folder(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which does not exist"
    if not path.exists():
        return f"{path}: there is no such folder; pass the folder of your models: penstock model check FOLDER"
    folder = path.parent
    if not os.path.isfile(folder / SETTINGS_FILE) and os.path.isfile(folder.parent / SETTINGS_FILE):
        folder = folder.parent
    return f"{path} is a file, but a model is a folder; try: penstock model check {folder}"


def check_model(path: Path, timeout_s: float) -> dict[str, Any]:
    """Check a model; return the model's properties, problems and warnings as JSON."""
    layout = examine_folder(path)
    result: dict[str, Any] = {"model": path.name, "path": str(path)}
    findings = layout.findings
    if layout.settings is not None:
        result |= {"versions": list(layout.versions), "task": layout.settings.task, "engine": layout.settings.engine}
        findings += examine_fit(layout.settings)
    known = {found.code for found in findings if not found.is_warning}
    if layout.settings is not None and known <= TASK_FILE_PROBLEMS:
        for version in layout.versions:
            facts, found = try_version(path, version, timeout_s)
            findings += [each for each in found if not (known and each.code in TASK_FILE_PROBLEMS)]
            findings += examine_precision(version_settings(path, version, layout.settings), facts)
            result |= facts | ({"version": version} if facts else {})
    report = as_json(findings)
    if report["problems"]:
        result["problem"] = report["problems"][0]["message"]
    return result | report
