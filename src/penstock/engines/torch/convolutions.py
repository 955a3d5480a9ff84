"""Loads ONNX files of convolutional image networks, such as SRCNN, as PyTorch modules."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from onnx import NodeProto, ValueInfoProto, helper, numpy_helper

from penstock.core.errors import ConfigError
from penstock.core.tensors import TensorSpec
from penstock.engines.onnx.onnx_network import read_network
from penstock.engines.torch.torch_devices import Target
from penstock.engines.torch.torch_model import TorchModel, choose_precision

_COMBINING = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul}
_KNOWN = ("Conv", "Relu", "Identity", *_COMBINING)


def open_network(file: Path, target: Target) -> TorchModel:
    """Load the network; raise ConfigError if it has an operation that is not in `_KNOWN`."""
    graph = read_network(file).graph
    strange = sorted({node.op_type for node in graph.node} - set(_KNOWN))
    if strange or len(graph.input) != 1 or len(graph.output) != 1:
        why = f"has {', '.join(strange)}" if strange else "does not have exactly one input and one output"
        raise ConfigError(
            f"{file}: engine: torch reads ONNX files of {', '.join(_KNOWN)} with one input and one output, but this "
            f"{why}; use engine: onnx or openvino",
            file=str(file),
        )
    weights = {each.name: numpy_helper.to_array(each, str(file.parent)) for each in graph.initializer}
    module = _ConvolutionNetwork(graph.node, weights, graph.input[0].name, graph.output[0].name)
    module.to(target.device).eval()
    precision, autocast = choose_precision(file, list(module.parameters()), target)
    if autocast is not None:  # once, because autocast would convert them in every call
        for part in module.convolutions:
            part.to(autocast)
    inputs, outputs = (_to_spec(file, graph.input[0]),), (_to_spec(file, graph.output[0]),)
    return TorchModel(inputs, outputs, precision, module, lambda tensors: module(tensors[0]), autocast=autocast)


class _ConvolutionNetwork(torch.nn.Module):
    def __init__(self, nodes: Sequence[NodeProto], weights: Mapping[str, Any], input_name: str, answer: str) -> None:
        super().__init__()
        self.convolutions = torch.nn.ModuleList()
        self._input_name, self._answer = input_name, answer
        self._steps: list[tuple[Any, list[str], str]] = []  # of each operation: the function, its inputs, its output
        for node in nodes:
            names = list(node.input)
            if node.op_type == "Conv":
                work: Any = _make_convolution(node, weights)
                self.convolutions.append(work)
                names = names[:1]
            elif node.op_type in _COMBINING:
                work = _COMBINING[node.op_type]
            else:
                work = torch.relu if node.op_type == "Relu" else _return_input
            self._steps.append((work, names, node.output[0]))
            if missing := [name for name in names if name in weights]:
                raise ConfigError(f"engine: torch cannot add the constant '{missing[0]}'; use engine: onnx or openvino")

    def forward(self, tensor: Any) -> Any:
        values = {self._input_name: tensor}
        for work, names, made in self._steps:
            values[made] = work(*[values[name] for name in names])
        return values[self._answer]


def _make_convolution(node: NodeProto, weights: Mapping[str, Any]) -> Any:
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    weight = weights[node.input[1]]
    pads = attributes.get("pads", [0, 0, 0, 0])
    if len(pads) != 4 or pads[:2] != pads[2:] or attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise ConfigError(f"the convolution '{node.name}' pads unevenly; use engine: onnx or openvino")
    groups = attributes.get("group", 1)
    layer = torch.nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),
        stride=tuple(attributes.get("strides", (1, 1))),
        padding=tuple(pads[:2]),
        dilation=tuple(attributes.get("dilations", (1, 1))),
        groups=groups,
        bias=len(node.input) > 2,
    )
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight.copy()))
        if layer.bias is not None:
            layer.bias.copy_(torch.from_numpy(weights[node.input[2]].copy()))
    return layer.requires_grad_(False)


def _return_input(tensor: Any) -> Any:
    return tensor


def _to_spec(file: Path, value: ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    if helper.tensor_dtype_to_np_dtype(tensor.elem_type).name != "float32":
        raise ConfigError(f"{file}: '{value.name}' is not FP32; use engine: onnx or openvino", file=str(file))
    sizes = (each.dim_value if each.HasField("dim_value") else -1 for each in tensor.shape.dim)
    return TensorSpec(value.name, "FP32", tuple(sizes))
