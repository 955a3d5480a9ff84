"""The sample model `identity`, which returns its input of 256 floats."""

import shutil
from importlib import resources
from pathlib import Path

import yaml

NOOP = "identity"


def write_noop(folder: Path, **settings: object) -> Path:
    """Write the sample model's folder; `settings` override keys of the sample's model.yaml."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    with resources.as_file(resources.files("penstock.models.samples") / "data" / "identity") as source:
        shutil.copy(source / "model.onnx", folder / "1" / "model.onnx")
        own = yaml.safe_load((source / "model.yaml").read_text(encoding="utf-8"))
    (folder / "model.yaml").write_text(yaml.safe_dump({**own, **settings}), encoding="utf-8")
    return folder
