"""Choose requests that fit a model: built-in texts or images, the user's own, prompts, or random tensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import numpy as np

from penstock.core.errors import ConfigError, InvalidRequest, Unavailable
from penstock.core.tensors import NUMPY_TYPES, Tensor, pack_bytes
from penstock.experiments.load.load_process import TextSpec
from penstock.experiments.load.load_prompts import GenerationShape, build_prompts, encode_prompts
from penstock.experiments.load.payloads import (
    KINDS,
    TEXTS,
    Payload,
    build_built_in_payloads,
    build_column_payloads,
    encode,
    list_text_pairs,
)
from penstock.experiments.load.tokens import parse_bounds
from penstock.wire.channels import make_bearer_header
from penstock.wire.credentials.client_tls import create_client_context
from penstock.wire.credentials.tls_files import NO_FILES, TlsFiles

TIMEOUT_S = 60.0  # the server may have to load the model first
PROMPTS = "prompts"  # the data for models that generate text
IMAGES = (".jpg", ".jpeg", ".png")
MAX_REQUEST_BYTES = 256 * 2**20  # size of all requests together, which the load generator holds in memory


def fetch_model_metadata(http: str, model: str, key: str = "", files: TlsFiles = NO_FILES) -> list[dict[str, Any]]:
    """Fetch the metadata of a served model, and return the model's inputs."""
    base = http if "://" in http else f"http://{http}"
    request = Request(f"{base.rstrip('/')}/v2/models/{quote(model)}", headers=dict(make_bearer_header(key)))
    context = create_client_context(files) if base.startswith("https:") else None
    try:
        with urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            inputs: list[dict[str, Any]] = json.load(answer)["inputs"]
            return inputs
    except HTTPError as error:
        with error:
            raise InvalidRequest(_read_reason(error)) from error
    except OSError as error:
        raise Unavailable(f"no answer ({error}): is `penstock serve` running at {http}?") from error
    except (ValueError, KeyError) as error:
        raise Unavailable(
            f"{request.full_url} did not return model metadata: is that the HTTP address of `penstock serve`?"
        ) from error


@dataclass(frozen=True, slots=True)
class LoadData:
    """The data that requests contain, except requests to models that generate text."""

    kind: str = "auto"  # auto: data that fit the model; a kind of built-in data; or a file of texts or folder of images
    items: int = 1  # per request
    shapes: Mapping[str, list[int]] = field(default_factory=dict)  # shapes of inputs with variable dimensions
    msmarco: Path | None = None  # texts to use instead of the built-in ones


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options that determine the requests of a load."""

    data: LoadData = field(default_factory=LoadData)
    generation: GenerationShape = field(default_factory=GenerationShape)
    is_streamed: bool = True
    goodput: str = ""


@dataclass(frozen=True, slots=True)
class RequestLoad:
    messages: list[bytes]
    items: int  # per request
    text: TextSpec | None = None  # set if the model generates text


def choose_load(
    model: str, options: LoadOptions, protocol: str, key: str, describe_model: Callable[[], list[dict[str, Any]]]
) -> RequestLoad:
    data = options.data
    inputs = [] if data.kind in (PROMPTS, *KINDS) else describe_model()
    if data.kind == PROMPTS or (data.kind == "auto" and choose_data_kind(inputs) == PROMPTS):
        if data.msmarco is not None:
            raise _unused_msmarco_error(PROMPTS)
        text = TextSpec(options.is_streamed, parse_bounds(options.goodput, options.is_streamed))
        prompts = build_prompts(model, options.generation)
        return RequestLoad(encode_prompts(prompts, protocol, options.is_streamed, key), 1, text)
    return RequestLoad(encode(build_payloads(data, model, inputs), protocol, key), data.items)


def build_payloads(data: LoadData, model: str, inputs: list[dict[str, Any]]) -> list[Payload]:
    """Return the requests for a model. `inputs` is the model's metadata, which may be empty for built-in data."""
    names = [entry["name"] for entry in inputs]
    if data.kind not in ("auto", "tensor", *KINDS):
        return _read_payloads(Path(data.kind), data, model, names)
    if names == ["query", "passage"]:
        columns = zip(*list_text_pairs(data.msmarco), strict=True)
        return build_column_payloads(model, dict(zip(names, columns, strict=True)), data.items)
    kind = choose_data_kind(inputs) if data.kind == "auto" else data.kind
    if data.msmarco is not None and kind not in TEXTS:
        raise _unused_msmarco_error(kind)
    if kind == "tensor":
        return [build_random_payload(model, inputs, data.items, data.shapes)]
    if names and {"photos": "image", "noop": "x"}.get(kind, "text") not in names:
        raise InvalidRequest(f"--data {kind} does not fit the model, which takes {', '.join(names)}: use other data")
    return build_built_in_payloads(kind, model, data.items, data.msmarco)


def _unused_msmarco_error(kind: str) -> InvalidRequest:
    return InvalidRequest(f"--msmarco provides texts, which --data {kind} does not use: leave out --msmarco")


def choose_data_kind(inputs: list[dict[str, Any]]) -> str:
    """Return the kind of data that fits a model, by the names of the model's inputs."""
    names = [(entry["name"], entry["datatype"]) for entry in inputs]
    if ("text_input", "BYTES") in names:
        return PROMPTS
    if names == [("text", "BYTES")]:
        return "mixed"
    if names == [("image", "BYTES")]:
        return "photos"
    return "tensor"


def _read_payloads(path: Path, data: LoadData, model: str, names: Sequence[str]) -> list[Payload]:
    if not path.exists():
        raise InvalidRequest(f"--data {path}: expected a file, a folder or one of auto, {', '.join(KINDS)}, tensor")
    if names == ["image"]:
        files = sorted(each for each in (path.iterdir() if path.is_dir() else [path]) if each.suffix.lower() in IMAGES)
        values: dict[str, Sequence[str | bytes]] = {"image": [file.read_bytes() for file in files]}
    elif names == ["text"]:
        values = {"text": _read_lines(path)}
    elif names == ["query", "passage"]:
        pairs = [line.split("\t", 1) for line in _read_lines(path) if "\t" in line]
        values = {"query": [pair[0] for pair in pairs], "passage": [pair[1] for pair in pairs]}
    else:
        raise InvalidRequest(f"--data {path}: files cannot provide the model's inputs {', '.join(names)}")
    if not all(values.values()):
        wanted = "JPEG or PNG files" if names == ["image"] else "one text per line (query, tab, passage for pairs)"
        raise InvalidRequest(f"--data {path}: expected {wanted}")
    if sum(len(value) for column in values.values() for value in column) > MAX_REQUEST_BYTES:
        raise InvalidRequest(f"--data {path}: larger than {MAX_REQUEST_BYTES // 2**20} MiB; use a part of the data")
    return build_column_payloads(model, values, data.items)


def _read_lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path}: cannot be read as text: {error}") from error


def build_random_payload(
    model: str, inputs: list[dict[str, Any]], rows: int, shapes: Mapping[str, list[int]]
) -> Payload:
    """Return random tensors. A variable first dimension becomes `rows`; other variable dimensions need `shapes`."""
    rng = np.random.default_rng(0)
    return Payload(model, tuple(_build_random_tensor(entry, rows, shapes, rng) for entry in inputs))


def _build_random_tensor(entry: Mapping[str, Any], rows: int, shapes: Mapping[str, list[int]], rng: Any) -> Tensor:
    name, datatype = entry["name"], entry["datatype"]
    shape = tuple(shapes.get(name) or _fix_shape(name, [int(size) for size in entry["shape"]], rows))
    count = int(np.prod(shape))
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, pack_bytes([b"a text"] * count))
    dtype = NUMPY_TYPES[datatype]
    # Small numbers are valid for all data types, and are token ids in all vocabularies.
    values = rng.integers(0, 2, count) if np.issubdtype(dtype, np.integer) or dtype == np.bool_ else rng.random(count)
    return Tensor(name, datatype, shape, values.astype(dtype).tobytes())


def _fix_shape(name: str, shape: list[int], rows: int) -> list[int]:
    closed = [rows if size == -1 and index == 0 else size for index, size in enumerate(shape)]
    if -1 in closed:
        raise InvalidRequest(
            f"input '{name}' has variable dimensions {shape}: set its shape, such as --shape {name}:1,128"
        )
    return closed


def _read_reason(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}"
