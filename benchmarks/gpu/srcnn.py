"""The SRCNN that ships, as PyTorch takes it: its ONNX file's three convolutions."""

from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import numpy_helper

FILE = "model.pt2"


def read_network(file: Path) -> Any:
    model = onnx.load(str(file))
    weights = {each.name: torch.from_numpy(numpy_helper.to_array(each).copy()) for each in model.graph.initializer}
    layers: list[torch.nn.Module] = []
    for node in model.graph.node:
        if node.op_type == "Relu":
            layers.append(torch.nn.ReLU())
        elif node.op_type == "Conv":
            weight, bias = (weights[name] for name in node.input[1:])
            kernel = weight.shape[-1]
            layer = torch.nn.Conv2d(weight.shape[1], weight.shape[0], kernel, padding=kernel // 2)
            layer.weight.data, layer.bias.data = weight, bias  # type: ignore[union-attr]
            layers.append(layer)
        else:
            raise ValueError(f"{file}: {node.op_type} is no part of SRCNN")
    return torch.nn.Sequential(*layers).eval()


def export_network(source: Path, target: Path) -> None:
    sides = {0: torch.export.Dim("batch", max=64), **dict.fromkeys((2, 3), torch.export.Dim.DYNAMIC)}
    program = torch.export.export(
        _Named(read_network(source)), (torch.zeros(2, 1, 64, 96),), dynamic_shapes={"luminance": sides}
    )
    torch.export.save(program, target)


class _Named(torch.nn.Module):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, luminance: Any) -> Any:
        return {"luminance_sr": self.network(luminance)}
