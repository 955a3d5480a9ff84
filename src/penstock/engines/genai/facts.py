"""What the files of a model that generates tell of it, without loading it: a GGUF's head, a folder's config.json."""

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
MAX_ITEMS = 4_194_304  # of a list, such as the vocabulary
MAX_TEXT_BYTES = 16 * 1024 * 1024
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
MAX_DIMENSIONS = 8
# Bytes of so many numbers, by the type of a tensor; what others take is not looked at.
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
    architecture: str  # as llama
    name: str
    context_tokens: int  # 0: it does not tell
    layers: int
    kv_heads: int
    head_size: int

    @property
    def values_per_token(self) -> int:
        """Numbers that the cache keeps of each token; 0: not known."""
        return 2 * self.layers * self.kv_heads * self.head_size


def read_facts(file: Path) -> GeneratorFacts:
    """Of a GGUF, or of the folder of an OpenVINO model. Raises ConfigError with what is wrong."""
    try:
        return _of_gguf(file) if file.suffix.lower() == ".gguf" else _of_folder(file.parent)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}", file=str(file)) from error
    except (ValueError, TypeError, KeyError, struct.error, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be understood: {error}", file=str(file), reason="wrong_format") from error


def _of_gguf(file: Path) -> GeneratorFacts:
    found = read_gguf_head(file)
    kind = str(found.get("general.architecture", ""))
    heads = _number(found, f"{kind}.attention.head_count")
    return GeneratorFacts(
        kind,
        str(found.get("general.name", "")),
        _number(found, f"{kind}.context_length"),
        _number(found, f"{kind}.block_count"),
        _number(found, f"{kind}.attention.head_count_kv") or heads,
        _number(found, f"{kind}.attention.key_length")
        or (_number(found, f"{kind}.embedding_length") // heads if heads else 0),
    )


def _of_folder(folder: Path) -> GeneratorFacts:
    found = json.loads((folder / "config.json").read_bytes())
    heads = _number(found, "num_attention_heads")
    return GeneratorFacts(
        str(found.get("model_type", "")),
        str(found.get("_name_or_path", "")),
        _number(found, "max_position_embeddings"),
        _number(found, "num_hidden_layers"),
        _number(found, "num_key_value_heads") or heads,
        _number(found, "head_dim") or (_number(found, "hidden_size") // heads if heads else 0),
    )


def read_gguf_head(file: Path) -> dict[str, Any]:
    """Its metadata, without what is in lists: those are long, and the runtime reads them itself."""
    with file.open("rb") as opened:
        if opened.read(4) != MAGIC:
            raise ValueError("this is no GGUF file")
        version, tensors, entries = _unpack(opened, "<IQQ")
        if version not in VERSIONS:
            raise ValueError(f"it is GGUF version {version}; {' and '.join(map(str, VERSIONS))} are read")
        if entries > MAX_ENTRIES or tensors > MAX_ENTRIES:
            raise ValueError(f"it has {entries} entries and {tensors} tensors")
        found: dict[str, Any] = {}
        for _ in range(entries):
            name = _text(opened)
            (kind,) = _unpack(opened, "<I")
            value = _value(opened, kind)
            if value is not None:
                found[name] = value
        _check_size(opened, tensors, found.get("general.alignment", 32))
        return found


def _check_size(opened: IO[bytes], tensors: int, alignment: int) -> None:
    """The runtime does not survive a file that ends too soon."""
    ends = [0]
    for _ in range(tensors):
        _text(opened)
        (dimensions,) = _unpack(opened, "<I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"it has a tensor of {dimensions} dimensions")
        *shape, kind, offset = _unpack(opened, f"<{dimensions}QIQ")
        size, of = _TENSORS.get(kind, (0, 1))
        ends.append(offset + prod(shape) // of * size)
    start = -(-opened.tell() // alignment) * alignment
    if tensors and (there := os.fstat(opened.fileno()).st_size) < start + max(ends):
        raise ValueError(f"it is cut off: it has {there} bytes of {start + max(ends)}")


def _value(opened: IO[bytes], kind: int) -> Any:
    if kind == _TEXT:
        return _text(opened)
    if kind == _LIST:
        of, items = _unpack(opened, "<IQ")
        if items > MAX_ITEMS:
            raise ValueError(f"it has a list of {items}")
        if of in _SCALARS:
            opened.seek(items * struct.calcsize(_SCALARS[of]), 1)
        else:
            for _ in range(items):
                _value(opened, of)
        return None
    if kind not in _SCALARS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _unpack(opened, f"<{_SCALARS[kind]}")[0]


def _text(opened: IO[bytes]) -> str:
    (size,) = _unpack(opened, "<Q")
    if size > MAX_TEXT_BYTES:
        raise ValueError(f"it has a text of {size} bytes")
    return opened.read(size).decode("utf-8", "replace")


def _unpack(opened: IO[bytes], form: str) -> tuple[Any, ...]:
    return struct.unpack(form, opened.read(struct.calcsize(form)))


def _number(found: Mapping[str, Any], name: str) -> int:
    value = found.get(name)
    return value if isinstance(value, int) else 0
