"""Write the winning configuration into the model's settings. If it uses a converted file, create a new version."""

import difflib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.core.errors import ConfigError
from penstock.experiments.tuning.model import TuneModel
from penstock.experiments.tuning.record import Applied
from penstock.experiments.tuning.space import Configuration
from penstock.models.folder import MODEL_ONLY, VERSION_FILE, ModelFolder, read_model_folder
from penstock.models.settings_file import edit_settings, flatten_keys


def group_changes_by_file(
    folder: ModelFolder, version: str, changes: Mapping[str, Any]
) -> dict[Path, Mapping[str, Any]]:
    """Group the changes by the settings file into which each change must be written.

    A change is written into model.yaml, or into version.yaml if version.yaml has the key already or if other versions
    are served, too.
    """
    own = folder.path / version / VERSION_FILE
    own_settings = flatten_keys(yaml.safe_load(own.read_text(encoding="utf-8")) or {}) if own.is_file() else {}
    is_shared = folder.settings.versions != "latest" and len({*folder.versions, version}) > 1
    inside = {
        key: value for key, value in changes.items() if key not in MODEL_ONLY and (is_shared or key in own_settings)
    }
    outside = {key: value for key, value in changes.items() if key not in inside}
    found = {folder.path / "model.yaml": outside, own: inside}
    return {file: part for file, part in found.items() if part}


def apply_winner(model: TuneModel, winner: Configuration, backups: Path) -> Applied:
    """Write all changes, or raise an error and write none. The previous files are copied to `backups`."""
    folder = read_model_folder(model.folder.path)  # read again, with all versions
    shipped = model.shipped()
    changes = winner.changes(shipped)
    version, is_new = model.version, False
    if winner.variant != shipped.variant and winner.variant.is_converted:
        from penstock.models.convert.quantize import publish_variant

        version = publish_variant(folder, version, winner.variant.engine, winner.variant.precision)
        is_new = True
        changes.pop("engine")  # the new version's version.yaml has this key
        if isinstance(folder.settings.versions, tuple):
            changes["versions"] = [*folder.settings.versions, int(version)]
        elif folder.settings.versions == "latest":
            changes["versions"] = [int(version)]  # pin the chosen version
    try:
        applied = _write(folder, version, changes, backups, lambda: _check(model, version, winner))
    except BaseException:
        if is_new:
            shutil.rmtree(folder.path / version, ignore_errors=True)
        raise
    return applied.model_copy(update={"new_folder": str(folder.path / version) if is_new else ""})


def _write(
    folder: ModelFolder, version: str, changes: Mapping[str, Any], backups: Path, check: Callable[[], None]
) -> Applied:
    backups.mkdir(parents=True, exist_ok=True)
    applied = Applied(version=version)
    parts = group_changes_by_file(folder, version, changes)
    before = {file: _read_text(file) for file in parts}
    try:
        for file, part in parts.items():
            edit_settings(file, part)
        check()
    except BaseException:
        for file, text in before.items():
            if text is None:
                file.unlink(missing_ok=True)
            elif _read_text(file) != text:
                file.write_text(text, encoding="utf-8")
        raise
    for file, text in before.items():
        name = str(file.relative_to(folder.path.parent))
        backup = backups / name.replace("/", "-")
        backup.write_text(text or "", encoding="utf-8")
        applied.files[str(file)] = str(backup) if text is not None else ""
        now = file.read_text(encoding="utf-8").splitlines(keepends=True)
        applied.diff += "".join(difflib.unified_diff((text or "").splitlines(keepends=True), now, name, name, n=1))
    return applied


def _check(model: TuneModel, version: str, winner: Configuration) -> None:
    """Read the model like a server; raise an error if the settings differ from the winner's settings."""
    folder = read_model_folder(model.folder.path)
    if version not in folder.versions:
        raise ConfigError(
            f"{folder.path}: version {version} would not be served with the setting versions: "
            f"{folder.settings.versions}; change the setting to include this version"
        )
    found = TuneModel(folder.of_version(version), model.variants).shipped()
    if found != winner:
        raise ConfigError(
            f"{folder.path}: version {version} reads back as {found} instead of {winner}; the changes were undone"
        )


def _read_text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None
