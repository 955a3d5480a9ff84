"""Puts models into a repository, linked or written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import yaml
from onnx import helper


def link_model(source: Path, target: Path, weights: Path | None = None, **changes: Any) -> None:
    """Link version 1 of the model in `source`, with `weights` from elsewhere if given.

    Override its settings with `changes`.
    """
    settings = yaml.safe_load((source / "model.yaml").read_text())
    for key, value in changes.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, Mapping) else value
    target.mkdir(parents=True)
    (target / "model.yaml").write_text(yaml.safe_dump(settings))
    (target / "1").symlink_to((weights or source / "1").resolve())


def serialize_network(graph: onnx.GraphProto) -> bytes:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    return bytes(model.SerializeToString())


def write_network(folder: Path, graph: onnx.GraphProto, **settings: Any) -> None:
    write_model(folder, "model.onnx", serialize_network(graph), **settings)


def python_settings(name: str, output: str, datatype: str, shape: Sequence[int], **settings: Any) -> dict[str, Any]:
    """Return the settings of a Python model from one tensor to another of the same kind."""
    sides = {"inputs": name, "outputs": output}
    tensors = {side: [{"name": each, "datatype": datatype, "shape": list(shape)}] for side, each in sides.items()}
    return {"engine": "python", "python": tensors, **settings}


def write_model(folder: Path, name: str, content: bytes, **settings: Any) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / name).write_bytes(content)
    (folder / "model.yaml").write_text(yaml.safe_dump(settings))


def write_version(folder: Path, version: int, name: str, content: bytes, **settings: Any) -> None:
    """Write a version while a server runs.

    The settings are written last, so the version is complete once they exist.
    """
    write_file(folder / str(version) / name, content)
    write_file(folder / "model.yaml", yaml.safe_dump(settings).encode())


def write_file(file: Path, content: bytes) -> None:
    """Write a file atomically: a server that reads it sees either the old content or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f".{file.name}.new")
    written.write_bytes(content)
    written.replace(file)
