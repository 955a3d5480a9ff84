"""The requests that candidates are measured with: real ones of the kind that the model takes, or the caller's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.experiments.load.described import random_payload, suitable_data
from penstock.experiments.load.payloads import TEXTS, Payload, build, of_columns
from penstock.models.samples.texts import passages, queries

IMAGES = (".jpg", ".jpeg", ".png")
MOST_BYTES = 256 * 2**20  # of all requests together: the generator holds them


@dataclass(frozen=True, slots=True)
class TuneData:
    kind: str = "auto"  # of the package's own, or the path of a file of texts or a folder of images
    items: int = 1  # in a request
    shapes: Mapping[str, list[int]] = field(default_factory=dict)  # of tensors whose shape the model leaves open


def payloads(data: TuneData, model: str, inputs: list[dict[str, Any]]) -> list[Payload]:
    """`inputs` as the served model describes them."""
    names = [entry["name"] for entry in inputs]
    path = Path(data.kind)
    if data.kind not in ("auto", "tensor", "photos", *TEXTS):
        if not path.exists():
            kinds = ", ".join(("auto", *TEXTS, "photos", "tensor"))
            raise InvalidRequest(f"--data {data.kind}: neither a file or folder, nor one of {kinds}")
        return _of_path(path, data, model, names)
    if names == ["query", "passage"]:
        return of_columns(model, {"query": queries(), "passage": passages()}, data.items)
    kind = suitable_data(inputs) if data.kind == "auto" else data.kind
    if kind == "tensor":
        return [random_payload(model, inputs, data.items, data.shapes)]
    if {"photos": "image"}.get(kind, "text") not in names:
        raise InvalidRequest(f"--data {kind}: the model takes {', '.join(names)}")
    return build(kind, model, data.items)


def _of_path(path: Path, data: TuneData, model: str, names: Sequence[str]) -> list[Payload]:
    if names == ["image"]:
        files = sorted(each for each in (path.iterdir() if path.is_dir() else [path]) if each.suffix.lower() in IMAGES)
        values: dict[str, Sequence[str | bytes]] = {"image": [file.read_bytes() for file in files]}
    elif names == ["text"]:
        values = {"text": _lines(path)}
    elif names == ["query", "passage"]:
        pairs = [line.split("\t", 1) for line in _lines(path) if "\t" in line]
        values = {"query": [pair[0] for pair in pairs], "passage": [pair[1] for pair in pairs]}
    else:
        raise InvalidRequest(f"--data {path}: the model takes {', '.join(names)}, which no file is read for")
    if not all(values.values()):
        wanted = "JPEG or PNG files" if names == ["image"] else "texts, one a line (query, tab, passage for pairs)"
        raise InvalidRequest(f"--data {path}: expected {wanted}")
    if sum(len(value) for column in values.values() for value in column) > MOST_BYTES:
        raise InvalidRequest(f"--data {path}: more than {MOST_BYTES // 2**20} MiB; give a part of it")
    return of_columns(model, values, data.items)


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path}: cannot be read as text: {error}") from error
