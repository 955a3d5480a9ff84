"""All that is wrong with models: which folders are looked at, and what is found of each."""

import os
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.models.check.findings import as_json
from penstock.models.check.fit import examine_fit, examine_precision
from penstock.models.check.layout import SETTINGS_FILE, examine_folder, looks_like_a_model
from penstock.models.check.trial_process import try_version
from penstock.models.folder import version_settings

# What a task misses beside the network: the network can be tried all the same, and may be wrong, too.
OF_THE_TASK = {"missing_tokenizer", "invalid_tokenizer", "missing_labels", "invalid_labels"}


def find_models(path: Path) -> list[Path]:
    """A folder that is or should be a model's, or those of a repository. Raises ConfigError where it is neither."""
    if path.name in ("", ".."):
        path = path.resolve()
    if not path.is_dir():
        raise ConfigError(_explain_no_folder(path))
    if os.path.lexists(path / SETTINGS_FILE):
        return [path]
    if os.path.isfile(path.parent / SETTINGS_FILE):
        raise ConfigError(f"{path} is a version's folder; give the model's: penstock model check {path.parent}")
    try:
        children = [child for child in sorted(path.iterdir()) if child.is_dir() and not child.name.startswith(".")]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    models = [child for child in children if os.path.lexists(child / SETTINGS_FILE)]
    if not models and looks_like_a_model(path):
        return [path]
    models += [child for child in children if child not in models and looks_like_a_model(child)]
    if not models:
        raise ConfigError(f"{path}: neither a model's folder (with {SETTINGS_FILE}) nor a repository of them")
    return sorted(models)


def _explain_no_folder(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which is not there"
    if not path.exists():
        return f"{path}: there is no such folder; say where your models are: penstock model check FOLDER"
    folder = path.parent
    if not os.path.isfile(folder / SETTINGS_FILE) and os.path.isfile(folder.parent / SETTINGS_FILE):
        folder = folder.parent
    return f"{path} is a file, and a model is a folder; try: penstock model check {folder}"


def check_model(path: Path, timeout_s: float) -> dict[str, Any]:
    """What is known of a model, as JSON, with its problems and warnings."""
    layout = examine_folder(path)
    result: dict[str, Any] = {"model": path.name, "path": str(path)}
    findings = layout.findings
    if layout.settings is not None:
        result |= {"versions": list(layout.versions), "task": layout.settings.task, "engine": layout.settings.engine}
        findings += examine_fit(layout.settings)
    known = {found.code for found in findings if not found.is_warning}
    if layout.settings is not None and known <= OF_THE_TASK:
        for version in layout.versions:
            facts, found = try_version(path, version, timeout_s)
            findings += [each for each in found if not (known and each.code in OF_THE_TASK)]
            findings += examine_precision(version_settings(path, version, layout.settings), facts)
            result |= facts | ({"version": version} if facts else {})
    told = as_json(findings)
    if told["problems"]:
        result["problem"] = told["problems"][0]["message"]
    return result | told
