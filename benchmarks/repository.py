"""Models put into a repository: linked from where they are, or written."""

from pathlib import Path
from typing import Any

import onnx
import yaml
from onnx import helper


def link_model(source: Path, target: Path, **changes: Any) -> None:
    """Version 1 of the model in the folder `source`, with its settings changed; weights are linked, not copied."""
    target.mkdir(parents=True)
    settings = yaml.safe_load((source / "model.yaml").read_text())
    (target / "model.yaml").write_text(yaml.safe_dump({**settings, **changes}))
    (target / "1").symlink_to((source / "1").resolve())


def write_network(folder: Path, graph: onnx.GraphProto, **settings: Any) -> None:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    write_model(folder, "model.onnx", model.SerializeToString(), **settings)


def write_model(folder: Path, name: str, content: bytes, **settings: Any) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / name).write_bytes(content)
    (folder / "model.yaml").write_text(yaml.safe_dump(settings))
