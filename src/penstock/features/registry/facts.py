"""Completes the facts that a client declares about a version; they must agree with the facts in model.yaml."""

from pathlib import Path
from typing import TypeVar

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.core.signature import Tensors
from penstock.core.yaml_file import read_yaml
from penstock.features.registry.manifest import SETTINGS_FILE, Manifest, ModelFacts, count_shards, find_path_fault
from penstock.models.folder import VERSION_FILE, version_settings
from penstock.models.model_yaml import ModelSettings

T = TypeVar("T")
QUANTIZATION = "quantization.json"  # `penstock model quantize` writes it next to its result


def read_settings(folder: Path, version: str) -> ModelSettings:
    """Read settings from a folder; raise InvalidRequest with a message that does not reveal the folder's path."""
    try:
        return version_settings(folder, version, read_yaml(folder / SETTINGS_FILE, ModelSettings))
    except ConfigError as error:
        raise InvalidRequest(error.message.replace(f"{folder.parent}/", ""), reason="settings") from error


def list_settings_files(version: str) -> tuple[str, str]:
    return SETTINGS_FILE, f"{version}/{VERSION_FILE}"


def complete_facts(manifest: Manifest, settings: ModelSettings, declared: ModelFacts) -> ModelFacts:
    """Complete the declared facts; raise InvalidRequest if files are missing or facts are wrong."""
    file = f"{manifest.version}/{settings.file}"
    if find_path_fault(file) or not manifest.has(file):
        raise InvalidRequest(
            f"{SETTINGS_FILE} names the file '{settings.file}', but '{file}' is missing", reason="files"
        )
    inputs, outputs = _find_declared_tensors(settings)
    is_batched = None if settings.is_batched == "auto" else settings.is_batched
    return ModelFacts(
        task=_require_agreement("task", settings.task, declared.task or None) or "",
        engine=_require_agreement("engine", settings.engine, declared.engine or None) or "",
        description=declared.description or settings.description[:4096],
        tags=tuple(dict.fromkeys((*settings.tags, *declared.tags))),
        inputs=_require_agreement("inputs", inputs, declared.inputs),
        outputs=_require_agreement("outputs", outputs, declared.outputs),
        batchable=_require_agreement("batchable", is_batched, declared.batchable),
        quantized=bool(
            _require_agreement(
                "quantized", manifest.has(f"{manifest.version}/{QUANTIZATION}") or None, declared.quantized
            )
        ),
        shards=_require_agreement("shards", count_shards(manifest), declared.shards),
    )


def _find_declared_tensors(settings: ModelSettings) -> tuple[Tensors | None, Tensors | None]:
    """Return the tensors that model.yaml declares, for engines whose files do not describe tensors."""
    if settings.engine not in ("python", "torch"):
        return None, None
    options = settings.python if settings.engine == "python" else settings.torch
    return options.inputs or None, options.outputs or None


def _require_agreement(name: str, found: T | None, declared: T | None) -> T | None:
    if found is not None and declared is not None and found != declared:
        raise InvalidRequest(
            f"metadata, {name}: declared as {declared!r:.200}, but found {found!r:.200}", reason="metadata"
        )
    return declared if found is None else found
