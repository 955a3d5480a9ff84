"""A BERT as an ONNX network: an encoder of sentences, or a classifier of texts and pairs."""

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
# Far below any score, so that the softmax gives a padded token exactly 0, and finite, so that
# a row without any token gives no NaN.
MASKED_SCORE = -10_000.0
IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"


class _Network:
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
        return self._share(np.array(value, dtype=np.float32))

    def integers(self, *values: int) -> str:
        return self._share(np.array(values, dtype=np.int64))

    def _share(self, array: Array) -> str:
        key = (array.dtype.name, *array.ravel().tolist())
        if key not in self.shared:
            self.shared[key] = self.weight(array)
        return self.shared[key]


class _Bert:
    def __init__(self, config: BertConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self.network = _Network()

    def embed_tokens(self, ids: str, types: str = "") -> str:
        """Without `types` every token is of type 0."""
        network, weights, hidden = self.network, self._weights, self._config.hidden
        words = weights.get("embeddings.word_embeddings.weight", -1, hidden)
        positions = weights.get("embeddings.position_embeddings.weight", -1, hidden)
        kinds = weights.get("embeddings.token_type_embeddings.weight", -1, hidden)
        if not types:
            positions = positions + kinds[0]
        count = network.op("Shape", ids, start=1, end=2)
        zero = network.integers(0)
        here = network.op("Slice", network.weight(positions), zero, count, zero)
        x = network.op("Add", network.op("Gather", network.weight(words), ids), here)
        if types:
            x = network.op("Add", x, network.op("Gather", network.weight(kinds), types))
        return self._layer_norm(x, "embeddings")

    def encode(self, x: str) -> str:
        bias = self.score_bias(MASK)
        for index in range(self._config.layers):
            x = self.layer(index, x, bias)
        return x

    def score_bias(self, mask: str) -> str:
        """[batch, 1, 1, tokens]: 0 for a token, MASKED_SCORE for padding."""
        network = self.network
        real = network.op("Cast", network.op("Unsqueeze", mask, network.integers(1, 2)), to=TensorProto.FLOAT)
        return network.op("Mul", network.op("Sub", network.number(1.0), real), network.number(MASKED_SCORE))

    def layer(self, index: int, x: str, bias: str) -> str:
        network, name = self.network, f"encoder.layer.{index}"
        attended = self._linear(self._attend(f"{name}.attention.self", x, bias), f"{name}.attention.output.dense")
        x = self._layer_norm(network.op("Add", attended, x), f"{name}.attention.output")
        inner = network.op("Gelu", self._linear(x, f"{name}.intermediate.dense", -1))
        outer = self._linear(inner, f"{name}.output.dense", self._config.hidden, -1)
        return self._layer_norm(network.op("Add", outer, x), f"{name}.output")

    def pool(self, x: str, mask: str, output: str) -> str:
        """The mean over a row's tokens, of length 1; zeros for a row without tokens."""
        network, first = self.network, self.network.integers(1)
        real = network.op("Cast", mask, to=TensorProto.FLOAT)
        # Not a MatMul with the mask: OpenVINO would run that in BF16, and the cosine to FP32 was
        # 0.99991 in place of 0.99997.
        kept = network.op("Mul", x, network.op("Unsqueeze", real, network.integers(2)))
        total = network.op("ReduceSum", kept, first, keepdims=0)
        count = network.op("Max", network.op("ReduceSum", real, first, keepdims=1), network.number(1e-9))
        mean = network.op("Div", total, count)
        norm = network.op("Max", network.op("ReduceL2", mean, first, keepdims=1), network.number(1e-12))
        return network.op("Div", mean, norm, output=output)

    def classify(self, x: str, classes: int, output: str) -> str:
        """From the first token, whose vector stands for the whole."""
        network = self.network
        first = network.op("Squeeze", network.op("Gather", x, network.integers(0), axis=1), network.integers(1))
        pooled = network.op("Tanh", self._linear(first, "pooler.dense"))
        return self._linear(pooled, "classifier", classes, output=output)

    def _attend(self, name: str, x: str, bias: str) -> str:
        network, size = self.network, self._config.hidden // self._config.heads
        split = network.integers(0, 0, self._config.heads, size)

        def heads_of(part: str, perm: Sequence[int]) -> str:
            return network.op("Transpose", network.op("Reshape", self._linear(x, f"{name}.{part}"), split), perm=perm)

        query, key, value = (
            heads_of("query", (0, 2, 1, 3)),
            heads_of("key", (0, 2, 3, 1)),
            heads_of("value", (0, 2, 1, 3)),
        )
        scores = network.op("Div", network.op("MatMul", query, key), network.number(sqrt(size)))
        shares = network.op("Softmax", network.op("Add", scores, bias), axis=-1)
        mixed = network.op("Transpose", network.op("MatMul", shares, value), perm=(0, 2, 1, 3))
        return network.op("Reshape", mixed, network.integers(0, 0, self._config.hidden))

    def _linear(self, x: str, name: str, width: int | None = None, depth: int | None = None, output: str = "") -> str:
        network, hidden = self.network, self._config.hidden
        weight = self._weights.get(f"{name}.weight", width or hidden, depth or hidden)
        bias = self._weights.get(f"{name}.bias", weight.shape[0])
        return network.op("Add", network.op("MatMul", x, network.weight(weight.T)), network.weight(bias), output=output)

    def _layer_norm(self, x: str, name: str) -> str:
        scale, shift = (
            self.network.weight(self._weights.get(f"{name}.LayerNorm.{part}", self._config.hidden))
            for part in ("weight", "bias")
        )
        return self.network.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=self._config.layer_norm_eps)


def build_encoder(config: BertConfig, weights: Weights) -> onnx.ModelProto:
    """Texts to vectors of length 1. Every token is of type 0."""
    bert = _Bert(config, weights)
    output = "sentence_embedding"
    bert.pool(bert.encode(bert.embed_tokens(IDS)), MASK, output)
    return _model(bert.network, "bert_sentence_encoder", (IDS, MASK), output, config.hidden)


def build_classifier(config: BertConfig, weights: Weights, classes: int) -> onnx.ModelProto:
    """Texts or pairs of texts to a number for each class."""
    bert = _Bert(config, weights)
    output = "logits"
    bert.classify(bert.encode(bert.embed_tokens(IDS, TYPES)), classes, output)
    return _model(bert.network, "bert_classifier", (IDS, MASK, TYPES), output, classes)


def _model(network: _Network, name: str, inputs: Sequence[str], output: str, width: int) -> onnx.ModelProto:
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
