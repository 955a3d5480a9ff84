"""Builds the ONNX network of a BERT model: an encoder of sentences, or a classifier of texts and pairs."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.core.tensors import Array
from penstock.engines.onnx.bert_source import BertConfig, Weights

OPSET = 20  # the first with Gelu
IR_VERSION = 10
# Far below any score, so that the softmax of a padded token is exactly 0; but finite, so that a row without tokens does
# not become NaN.
MASKED_SCORE = -10_000.0
IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"


class _NetworkBuilder:
    """Collects the nodes and constants of an ONNX network, in the order in which they are added.

    Each method returns the name of an output or constant.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        # Constants that every layer shares, such as shapes and axes.
        self.shared: dict[tuple[object, ...], str] = {}

    def add_op(self, op_type: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def add_weight(self, array: Array) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add_number(self, value: float) -> str:
        return self._add_shared(np.array(value, dtype=np.float32))

    def add_integers(self, *values: int) -> str:
        return self._add_shared(np.array(values, dtype=np.int64))

    def _add_shared(self, array: Array) -> str:
        key = (array.dtype.name, *array.ravel().tolist())
        if key not in self.shared:
            self.shared[key] = self.add_weight(array)
        return self.shared[key]


class _BertLayers:
    """Adds the layers of a BERT model to a network."""

    def __init__(self, config: BertConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self.network = _NetworkBuilder()

    def embed_tokens(self, ids: str, types: str = "") -> str:
        """Add the embeddings of tokens, positions and token types. Without `types`, every token has type 0."""
        network, weights, hidden = self.network, self._weights, self._config.hidden
        words = weights.get("embeddings.word_embeddings.weight", -1, hidden)
        positions = weights.get("embeddings.position_embeddings.weight", -1, hidden)
        kinds = weights.get("embeddings.token_type_embeddings.weight", -1, hidden)
        if not types:
            positions = positions + kinds[0]
        count = network.add_op("Shape", ids, start=1, end=2)
        zero = network.add_integers(0)
        here = network.add_op("Slice", network.add_weight(positions), zero, count, zero)
        x = network.add_op("Add", network.add_op("Gather", network.add_weight(words), ids), here)
        if types:
            x = network.add_op("Add", x, network.add_op("Gather", network.add_weight(kinds), types))
        return self._add_layer_norm(x, "embeddings")

    def encode(self, x: str) -> str:
        bias = self.score_bias(MASK)
        for index in range(self._config.layers):
            x = self.layer(index, x, bias)
        return x

    def score_bias(self, mask: str) -> str:
        """Add the bias [batch, 1, 1, tokens] of attention scores: 0 for a token, MASKED_SCORE for padding."""
        network = self.network
        real = network.add_op(
            "Cast", network.add_op("Unsqueeze", mask, network.add_integers(1, 2)), to=TensorProto.FLOAT
        )
        return network.add_op(
            "Mul", network.add_op("Sub", network.add_number(1.0), real), network.add_number(MASKED_SCORE)
        )

    def layer(self, index: int, x: str, bias: str) -> str:
        network, name = self.network, f"encoder.layer.{index}"
        attended = self._add_linear(
            self._add_attention(f"{name}.attention.self", x, bias), f"{name}.attention.output.dense"
        )
        x = self._add_layer_norm(network.add_op("Add", attended, x), f"{name}.attention.output")
        inner = network.add_op("Gelu", self._add_linear(x, f"{name}.intermediate.dense", -1))
        outer = self._add_linear(inner, f"{name}.output.dense", self._config.hidden, -1)
        return self._add_layer_norm(network.add_op("Add", outer, x), f"{name}.output")

    def pool(self, x: str, mask: str, output: str) -> str:
        """Add the mean over each row's tokens, scaled to length 1; zeros for a row without tokens."""
        network, first = self.network, self.network.add_integers(1)
        real = network.add_op("Cast", mask, to=TensorProto.FLOAT)
        # Not a MatMul with the mask: OpenVINO would compute it in BF16, with a measured cosine to FP32 of 0.99991
        # instead of 0.99997.
        kept = network.add_op("Mul", x, network.add_op("Unsqueeze", real, network.add_integers(2)))
        total = network.add_op("ReduceSum", kept, first, keepdims=0)
        count = network.add_op("Max", network.add_op("ReduceSum", real, first, keepdims=1), network.add_number(1e-9))
        mean = network.add_op("Div", total, count)
        norm = network.add_op("Max", network.add_op("ReduceL2", mean, first, keepdims=1), network.add_number(1e-12))
        return network.add_op("Div", mean, norm, output=output)

    def classify(self, x: str, classes: int, output: str) -> str:
        """Add the classifier, which reads only the first token's vector."""
        network = self.network
        first = network.add_op(
            "Squeeze", network.add_op("Gather", x, network.add_integers(0), axis=1), network.add_integers(1)
        )
        pooled = network.add_op("Tanh", self._add_linear(first, "pooler.dense"))
        return self._add_linear(pooled, "classifier", classes, output=output)

    def _add_attention(self, name: str, x: str, bias: str) -> str:
        network, size = self.network, self._config.hidden // self._config.heads
        split = network.add_integers(0, 0, self._config.heads, size)

        def heads_of(part: str, perm: Sequence[int]) -> str:
            return network.add_op(
                "Transpose", network.add_op("Reshape", self._add_linear(x, f"{name}.{part}"), split), perm=perm
            )

        query, key, value = (
            heads_of("query", (0, 2, 1, 3)),
            heads_of("key", (0, 2, 3, 1)),
            heads_of("value", (0, 2, 1, 3)),
        )
        scores = network.add_op("Div", network.add_op("MatMul", query, key), network.add_number(sqrt(size)))
        shares = network.add_op("Softmax", network.add_op("Add", scores, bias), axis=-1)
        mixed = network.add_op("Transpose", network.add_op("MatMul", shares, value), perm=(0, 2, 1, 3))
        return network.add_op("Reshape", mixed, network.add_integers(0, 0, self._config.hidden))

    def _add_linear(
        self, x: str, name: str, width: int | None = None, depth: int | None = None, output: str = ""
    ) -> str:
        network, hidden = self.network, self._config.hidden
        weight = self._weights.get(f"{name}.weight", width or hidden, depth or hidden)
        bias = self._weights.get(f"{name}.bias", weight.shape[0])
        return network.add_op(
            "Add", network.add_op("MatMul", x, network.add_weight(weight.T)), network.add_weight(bias), output=output
        )

    def _add_layer_norm(self, x: str, name: str) -> str:
        scale, shift = (
            self.network.add_weight(self._weights.get(f"{name}.LayerNorm.{part}", self._config.hidden))
            for part in ("weight", "bias")
        )
        return self.network.add_op("LayerNormalization", x, scale, shift, axis=-1, epsilon=self._config.layer_norm_eps)


def build_encoder(config: BertConfig, weights: Weights) -> onnx.ModelProto:
    """Build a network that encodes texts as vectors of length 1."""
    bert = _BertLayers(config, weights)
    output = "sentence_embedding"
    bert.pool(bert.encode(bert.embed_tokens(IDS)), MASK, output)
    return _make_model(bert.network, "bert_sentence_encoder", (IDS, MASK), output, config.hidden)


def build_classifier(config: BertConfig, weights: Weights, classes: int) -> onnx.ModelProto:
    """Build a classifier of texts or pairs of texts that gives one number per class."""
    bert = _BertLayers(config, weights)
    output = "logits"
    bert.classify(bert.encode(bert.embed_tokens(IDS, TYPES)), classes, output)
    return _make_model(bert.network, "bert_classifier", (IDS, MASK, TYPES), output, classes)


def _make_model(network: _NetworkBuilder, name: str, inputs: Sequence[str], output: str, width: int) -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    made = helper.make_graph(
        network.nodes,
        name,
        [info(each, TensorProto.INT64, ["batch", "tokens"]) for each in inputs],
        [info(output, TensorProto.FLOAT, ["batch", width])],
        network.constants,
    )
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(made, producer_name="penstock", opset_imports=[opset], ir_version=IR_VERSION)
