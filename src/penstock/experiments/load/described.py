"""Requests for a served model: what fits its description, prompts for one that generates text, else random tensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import numpy as np

from penstock.core.errors import InvalidRequest, Unavailable
from penstock.core.tensors import NUMPY_TYPES, Tensor, pack_bytes
from penstock.experiments.load.payloads import TEXTS, Payload, build, encode
from penstock.experiments.load.process import TextSpec
from penstock.experiments.load.prompts import GenerationShape, build_prompts, encode_prompts
from penstock.experiments.load.tokens import parse_bounds
from penstock.wire.channels import bearer
from penstock.wire.credentials.channels import client_context
from penstock.wire.credentials.files import NO_FILES, TlsFiles

TIMEOUT_S = 60.0  # a model may have to be loaded first
PROMPTS = "prompts"  # the data of models that generate text


def describe(http: str, model: str, key: str = "", files: TlsFiles = NO_FILES) -> list[dict[str, Any]]:
    """The inputs of a served model, as the protocol's metadata tells them."""
    base = http if "://" in http else f"http://{http}"
    request = Request(f"{base.rstrip('/')}/v2/models/{quote(model)}", headers=dict(bearer(key)))
    context = client_context(files) if base.startswith("https:") else None
    try:
        with urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            inputs: list[dict[str, Any]] = json.load(answer)["inputs"]
            return inputs
    except HTTPError as error:
        with error:
            raise InvalidRequest(f"model '{model}': {_reason(error)}") from error
    except OSError as error:
        raise Unavailable(f"no answer ({error}): is `penstock serve` running at {http}?") from error
    except (ValueError, KeyError) as error:
        raise Unavailable(
            f"{request.full_url} is no model's description: is that the HTTP address of `penstock serve`?"
        ) from error


@dataclass(frozen=True, slots=True)
class AskedLoad:
    """What requests are to carry, as options say it."""

    data: str = "auto"  # what fits the model, as the server describes it
    items: int = 1
    msmarco: Path | None = None
    shapes: Mapping[str, list[int]] = field(default_factory=dict)
    generation: GenerationShape = field(default_factory=GenerationShape)
    is_streamed: bool = True
    goodput: str = ""


@dataclass(frozen=True, slots=True)
class ChosenLoad:
    messages: list[bytes]
    items: int  # in a request
    text: TextSpec | None = None  # of a model that generates it


def choose_load(
    model: str, asked: AskedLoad, protocol: str, key: str, describe_model: Callable[[], list[dict[str, Any]]]
) -> ChosenLoad:
    kind, inputs = asked.data, list[dict[str, Any]]()
    if kind in ("auto", "tensor"):
        inputs = describe_model()
        kind = suitable_data(inputs) if kind == "auto" else kind
    if asked.msmarco is not None and kind not in TEXTS:
        raise InvalidRequest(f"--msmarco gives texts, and --data {kind} takes none")
    if kind == PROMPTS:
        text = TextSpec(asked.is_streamed, parse_bounds(asked.goodput, asked.is_streamed))
        prompts = build_prompts(model, asked.generation)
        return ChosenLoad(encode_prompts(prompts, protocol, asked.is_streamed, key), 1, text)
    if kind == "tensor":
        payloads = [random_payload(model, inputs, asked.items, asked.shapes)]
    else:
        payloads = build(kind, model, asked.items, asked.msmarco)
    return ChosenLoad(encode(payloads, protocol, key), asked.items)


def suitable_data(inputs: list[dict[str, Any]]) -> str:
    """The kind of data that fits a model: by the names that tasks give their inputs."""
    names = [(entry["name"], entry["datatype"]) for entry in inputs]
    if ("text_input", "BYTES") in names:
        return PROMPTS
    if names == [("text", "BYTES")]:
        return "mixed"
    if names == [("image", "BYTES")]:
        return "photos"
    return "tensor"


def random_payload(model: str, inputs: list[dict[str, Any]], rows: int, shapes: Mapping[str, list[int]]) -> Payload:
    """A first size that is open is the number of rows; any other must be given in `shapes`."""
    rng = np.random.default_rng(0)
    return Payload(model, tuple(_random_tensor(entry, rows, shapes, rng) for entry in inputs))


def _random_tensor(entry: Mapping[str, Any], rows: int, shapes: Mapping[str, list[int]], rng: Any) -> Tensor:
    name, datatype = entry["name"], entry["datatype"]
    shape = tuple(shapes.get(name) or _closed(name, [int(size) for size in entry["shape"]], rows))
    count = int(np.prod(shape))
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, pack_bytes([b"a text"] * count))
    dtype = NUMPY_TYPES[datatype]
    # Small numbers fit every type, and every vocabulary.
    values = rng.integers(0, 2, count) if np.issubdtype(dtype, np.integer) or dtype == np.bool_ else rng.random(count)
    return Tensor(name, datatype, shape, values.astype(dtype).tobytes())


def _closed(name: str, shape: list[int], rows: int) -> list[int]:
    closed = [rows if size == -1 and index == 0 else size for index, size in enumerate(shape)]
    if -1 in closed:
        raise InvalidRequest(f"input '{name}' has the open shape {shape}: give one with --shape {name}:1,128")
    return closed


def _reason(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}"
