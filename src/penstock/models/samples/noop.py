"""A model that does nothing: 256 floats in, the same out."""

import shutil
from importlib import resources
from pathlib import Path

import yaml

NOOP = "identity"


def write_noop(folder: Path, **settings: object) -> Path:
    """As a model's folder, with `settings` laid over its own."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    with resources.as_file(resources.files("penstock.models.samples") / "data" / "identity") as source:
        shutil.copy(source / "model.onnx", folder / "1" / "model.onnx")
        own = yaml.safe_load((source / "model.yaml").read_text(encoding="utf-8"))
    (folder / "model.yaml").write_text(yaml.safe_dump({**own, **settings}), encoding="utf-8")
    return folder
