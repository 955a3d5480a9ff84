"""Reads properties of a text-generating model without loading it: from a GGUF file's head or a config.json."""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

from penstock.core.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
IR_FILE = "openvino_model.xml"
TOKENIZER_FILES = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
MAX_ENTRIES = 65_536
MAX_ITEMS = 4_194_304  # in a list, such as the vocabulary
MAX_TEXT_BYTES = 16 * 1024 * 1024
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
MAX_DIMENSIONS = 8
# By tensor type: the size in bytes of a group of numbers, and how many numbers are in the group. The sizes of tensors
# of other types are not checked.
_TENSORS = {
    0: (4, 1),
    1: (2, 1),
    30: (2, 1),
    2: (18, 32),
    3: (20, 32),
    6: (22, 32),
    7: (24, 32),
    8: (34, 32),
    10: (84, 256),
    11: (110, 256),
    12: (144, 256),
    13: (176, 256),
    14: (210, 256),
}


@dataclass(frozen=True, slots=True)
class GeneratorFacts:
    architecture: str  # such as llama
    name: str
    context_tokens: int  # 0: unknown
    layers: int
    kv_heads: int
    head_size: int


def read_facts(file: Path) -> GeneratorFacts:
    """Read the properties of a GGUF file or an OpenVINO folder; raise ConfigError if the model is invalid."""
    try:
        return _read_gguf_facts(file) if file.suffix.lower() == ".gguf" else _read_folder_facts(file.parent)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}", file=str(file)) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}", file=str(file), reason="wrong_format") from error


def _read_gguf_facts(file: Path) -> GeneratorFacts:
    found = read_gguf_head(file)
    kind = str(found.get("general.architecture", ""))
    heads = _number_or_zero(found, f"{kind}.attention.head_count")
    return GeneratorFacts(
        kind,
        str(found.get("general.name", "")),
        _number_or_zero(found, f"{kind}.context_length"),
        _number_or_zero(found, f"{kind}.block_count"),
        _number_or_zero(found, f"{kind}.attention.head_count_kv") or heads,
        _number_or_zero(found, f"{kind}.attention.key_length")
        or (_number_or_zero(found, f"{kind}.embedding_length") // heads if heads else 0),
    )


def _read_folder_facts(folder: Path) -> GeneratorFacts:
    found = json.loads((folder / "config.json").read_bytes())
    heads = _number_or_zero(found, "num_attention_heads")
    return GeneratorFacts(
        str(found.get("model_type", "")),
        str(found.get("_name_or_path", "")),
        _number_or_zero(found, "max_position_embeddings"),
        _number_or_zero(found, "num_hidden_layers"),
        _number_or_zero(found, "num_key_value_heads") or heads,
        _number_or_zero(found, "head_dim") or (_number_or_zero(found, "hidden_size") // heads if heads else 0),
    )


def read_gguf_head(file: Path) -> dict[str, Any]:
    """Return a GGUF file's metadata, except lists (such as the vocabulary), which only the runtime needs."""
    with file.open("rb") as opened:
        if opened.read(4) != MAGIC:
            raise ValueError("the file does not begin with 'GGUF'")
        version, tensors, entries = _read_struct(opened, "<IQQ")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version} is not supported, only {' and '.join(map(str, VERSIONS))}")
        if entries > MAX_ENTRIES or tensors > MAX_ENTRIES:
            raise ValueError(f"the file declares {entries} entries and {tensors} tensors, more than {MAX_ENTRIES}")
        found: dict[str, Any] = {}
        for _ in range(entries):
            name = _read_text(opened)
            (kind,) = _read_struct(opened, "<I")
            value = _read_value(opened, kind)
            if value is not None:
                found[name] = value
        _check_size(opened, tensors, found.get("general.alignment", 32))
        return found


def _check_size(opened: IO[bytes], tensors: int, alignment: int) -> None:
    """Raise ValueError if the file is cut off, because the runtime would crash."""
    ends = [0]
    for _ in range(tensors):
        _read_text(opened)
        (dimensions,) = _read_struct(opened, "<I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions, more than {MAX_DIMENSIONS}")
        *shape, kind, offset = _read_struct(opened, f"<{dimensions}QIQ")
        size, of = _TENSORS.get(kind, (0, 1))
        ends.append(offset + prod(shape) // of * size)
    start = -(-opened.tell() // alignment) * alignment
    if tensors and (there := os.fstat(opened.fileno()).st_size) < start + max(ends):
        raise ValueError(f"the file is cut off: it has {there} bytes instead of {start + max(ends)}")


def _read_value(opened: IO[bytes], type_number: int) -> Any:
    if type_number == _TEXT:
        return _read_text(opened)
    if type_number == _LIST:
        of, items = _read_struct(opened, "<IQ")
        if items > MAX_ITEMS:
            raise ValueError(f"a list has {items} items, more than {MAX_ITEMS}")
        if of in _SCALARS:
            opened.seek(items * struct.calcsize(_SCALARS[of]), 1)
        else:
            for _ in range(items):
                _read_value(opened, of)
        return None
    if type_number not in _SCALARS:
        raise ValueError(
            f"a metadata value has the unknown type {type_number}: the file is damaged, or newer than Penstock supports"
        )
    return _read_struct(opened, f"<{_SCALARS[type_number]}")[0]


def _read_text(opened: IO[bytes]) -> str:
    (size,) = _read_struct(opened, "<Q")
    if size > MAX_TEXT_BYTES:
        raise ValueError(f"a text has {size} bytes, more than {MAX_TEXT_BYTES}")
    return opened.read(size).decode("utf-8", "replace")


def _read_struct(opened: IO[bytes], struct_format: str) -> tuple[Any, ...]:
    wanted = struct.calcsize(struct_format)
    found = opened.read(wanted)
    if len(found) < wanted:
        raise ValueError(f"the file is cut off after {os.fstat(opened.fileno()).st_size} bytes: download it again")
    return struct.unpack(struct_format, found)


def _number_or_zero(metadata: Mapping[str, Any], name: str) -> int:
    value = metadata.get(name)
    return value if isinstance(value, int) else 0
