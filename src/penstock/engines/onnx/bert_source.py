"""Reads the sizes and weights of a BERT model from config.json and model.safetensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from penstock.core.tensors import Array, is_shape_accepted
from penstock.engines.checkpoint import Checkpoint, file_error, require_file

# Names of a layer norm's parameters in checkpoints that come from TensorFlow.
OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
HEAD = "classifier."  # the classifier is not part of BertModel, so its tensors have no prefix


@dataclass(frozen=True, slots=True)
class BertConfig:
    hidden: int
    layers: int
    heads: int
    layer_norm_eps: float

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "BertConfig":
        path, raw = checkpoint.folder / "config.json", checkpoint.config
        for key, supported in (
            ("model_type", "bert"),
            ("hidden_act", "gelu"),
            ("position_embedding_type", "absolute"),
            ("is_decoder", False),
        ):
            # Only `model_type` is required; other keys have defaults, which are supported.
            given = raw.get(key, None if key == "model_type" else supported)
            if given != supported:
                raise file_error(path, f"{key} is {given!r}, but only {supported!r} can be converted")
        hidden, layers, heads = (
            _read_positive(path, raw, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        if hidden % heads:
            raise file_error(path, f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        eps = raw.get("layer_norm_eps", 1e-12)
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise file_error(path, f"layer_norm_eps must be between 0 and 1, got {eps!r}")
        return cls(hidden, layers, heads, eps)


class Weights:
    """A checkpoint's tensors by their names in BertModel, without the prefix that some checkpoints add to names."""

    def __init__(self, path: Path, tensors: dict[str, Array]) -> None:
        self._path = path
        self._tensors = tensors
        self._prefix = "bert." if any(name.startswith("bert.embeddings.") for name in tensors) else ""

    @classmethod
    def read(cls, path: Path) -> "Weights":
        try:
            with safe_open(require_file(path), "np") as file:
                return cls(path, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise file_error(path, f"cannot be read: {error}") from error

    def get(self, name: str, *shape: int) -> Array:
        """Return a tensor as FP32; raise ConfigError unless it has the given shape, in which -1 means any size."""
        full = name if name.startswith(HEAD) else self._prefix + name
        tensor = self._tensors.get(full)
        if tensor is None:
            for new, old in OLD_NAMES.items():
                if name.endswith(new):
                    tensor = self._tensors.get(full.removesuffix(new) + old)
        if tensor is None:
            raise file_error(self._path, f"has no tensor '{full}'")
        if not is_shape_accepted(tensor.shape, shape):
            raise file_error(self._path, f"tensor '{name}' has shape {list(tensor.shape)}, expected {list(shape)}")
        return np.ascontiguousarray(tensor, dtype=np.float32)


def _read_positive(path: Path, raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise file_error(path, f"{key} must be a positive number, got {value!r}")
    return value
