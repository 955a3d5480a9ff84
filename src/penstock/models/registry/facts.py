"""What the registry knows of a version: what model.yaml says, and what was told beside it where the two agree."""

from pathlib import Path
from typing import TypeVar

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.core.manifest import SETTINGS_FILE, Manifest, ModelFacts, Tensors, count_shards, path_fault
from penstock.core.yaml_file import read_yaml
from penstock.models.folder import VERSION_FILE, version_settings
from penstock.models.settings import ModelSettings

T = TypeVar("T")
QUANTIZATION = "quantization.json"  # `penstock model quantize` leaves it beside what it makes


def read_settings(folder: Path, version: str) -> ModelSettings:
    """Of a folder that has these files alone; raises InvalidRequest without telling where that is."""
    try:
        return version_settings(folder, version, read_yaml(folder / SETTINGS_FILE, ModelSettings))
    except ConfigError as error:
        raise InvalidRequest(error.message.replace(f"{folder.parent}/", ""), reason="settings") from error


def settings_files(version: str) -> tuple[str, str]:
    return SETTINGS_FILE, f"{version}/{VERSION_FILE}"


def complete_facts(manifest: Manifest, settings: ModelSettings, told: ModelFacts) -> ModelFacts:
    """Raises InvalidRequest where files are missing, or what was told is not so."""
    file = f"{manifest.version}/{settings.file}"
    if path_fault(file) or not manifest.has(file):
        raise InvalidRequest(
            f"{SETTINGS_FILE} names the file '{settings.file}', and there is no '{file}'", reason="files"
        )
    inputs, outputs = _declared(settings)
    is_batched = None if settings.is_batched == "auto" else settings.is_batched
    return ModelFacts(
        task=_agreed("task", settings.task, told.task or None) or "",
        engine=_agreed("engine", settings.engine, told.engine or None) or "",
        description=told.description or settings.description[:4096],
        tags=tuple(dict.fromkeys((*settings.tags, *told.tags))),
        inputs=_agreed("inputs", inputs, told.inputs),
        outputs=_agreed("outputs", outputs, told.outputs),
        batchable=_agreed("batchable", is_batched, told.batchable),
        quantized=bool(
            _agreed("quantized", manifest.has(f"{manifest.version}/{QUANTIZATION}") or None, told.quantized)
        ),
        shards=_agreed("shards", count_shards(manifest), told.shards),
    )


def _declared(settings: ModelSettings) -> tuple[Tensors | None, Tensors | None]:
    """What model.yaml says of the tensors of an engine whose files do not tell."""
    if settings.engine not in ("python", "torch"):
        return None, None
    options = settings.python if settings.engine == "python" else settings.torch
    return options.inputs or None, options.outputs or None


def _agreed(name: str, found: T | None, told: T | None) -> T | None:
    if found is not None and told is not None and found != told:
        raise InvalidRequest(f"metadata, {name}: was told as {told!r:.200}, but is {found!r:.200}", reason="metadata")
    return told if found is None else found
