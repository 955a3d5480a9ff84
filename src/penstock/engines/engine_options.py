"""The sections of model.yaml that configure engines, one section per engine."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from penstock.core.packets import ANSWER_SPECS, PACKET_SPECS
from penstock.core.settings import Section
from penstock.core.signature import DeclaredTensor, Tensors
from penstock.core.tensors import TensorSpec


def _to_declared(specs: Sequence[TensorSpec]) -> list[DeclaredTensor]:
    return [DeclaredTensor(name=spec.name, datatype=spec.datatype, shape=spec.shape) for spec in specs]


class PythonOptions(Section):
    """Settings of a Python model: its inputs and outputs, and options for running it."""

    inputs: Tensors = ()
    outputs: Tensors = ()
    is_decoupled: bool = False  # one request may have any number of answers
    takes_packets: bool = False  # `infer` gets a whole packet of the block protocol; inputs and outputs are fixed
    memory_mb: Annotated[int, Field(ge=64)] | Literal["auto", "none"] = (
        "auto"  # of one instance; docs/configuration.md describes auto
    )

    @model_validator(mode="before")
    @classmethod
    def _declare_packets(cls, value: Any) -> Any:
        """Set the inputs and outputs of a model that takes whole packets of the block protocol."""
        if not isinstance(value, dict) or value.get("takes_packets") is not True:
            return value
        if value.get("inputs") or value.get("outputs"):
            raise ValueError("takes_packets declares the inputs and outputs itself: leave out inputs and outputs")
        if value.get("is_decoupled"):
            raise ValueError(
                "takes_packets and is_decoupled exclude each other, as a packet has one answer: remove one"
            )
        return {**value, "inputs": _to_declared(PACKET_SPECS), "outputs": _to_declared(ANSWER_SPECS)}


class TorchOptions(Section):
    """Settings of a PyTorch file: its inputs and outputs, if the file does not describe them, and how to run it."""

    inputs: Tensors = ()  # in the order of the model's arguments; required for a TorchScript file
    outputs: Tensors = ()
    compile: bool = False  # torch.compile, which takes minutes on the first requests
    graphs: bool = True  # on CUDA, for a model's folder: capture one graph per batch shape while loading


class GenaiOptions(Section):
    """Settings of OpenVINO GenAI: the memory for its cache, and its CPU priority."""

    cache_mb: Annotated[int, Field(ge=16)] = 1024  # for keys and values of all sequences together
    nice: Annotated[int, Field(ge=0, le=19)] = 0  # 19: compute only when no other process needs the CPU


Sizes = tuple[Annotated[int, Field(ge=0)], ...]


def _convert_to_text(value: Any) -> Any:
    """Convert capabilities, such as 8.9, which YAML reads as numbers, back to text."""
    if not isinstance(value, list | tuple):
        return value
    return [f"{each:.1f}" if isinstance(each, int | float) else each for each in value]


Capability = Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")]  # a GPU's compute capability: 8.9


class ShapeRange(Section):
    """The sizes that one input may have: the smallest, the one to optimize for, and the largest."""

    min: Sizes
    opt: Sizes
    max: Sizes

    @model_validator(mode="after")
    def _check_order(self) -> "ShapeRange":
        if not len(self.min) == len(self.opt) == len(self.max):
            raise ValueError("min, opt and max must have the same number of sizes")
        if any(not low <= best <= high for low, best, high in zip(self.min, self.opt, self.max, strict=True)):
            raise ValueError("each size must satisfy min <= opt <= max")
        return self


class TensorRtOptions(Section):
    """Settings for building a TensorRT engine from an ONNX file."""

    library: Literal["auto", "tensorrt", "tensorrt_rtx"] = "auto"  # auto: TensorRT, else TensorRT-RTX
    shapes: dict[str, ShapeRange] = {}  # noqa: RUF012 - pydantic copies it; for inputs whose sizes no other setting limits
    capabilities: Annotated[
        tuple[Capability, ...], BeforeValidator(_convert_to_text)
    ] = ()  # of the GPUs for which TensorRT-RTX builds; empty: all that it supports
