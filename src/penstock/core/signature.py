"""The inputs and outputs of a model, which its file or its author declares."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from penstock.core.settings import Section
from penstock.core.tensors import BYTES, NUMPY_TYPES, TensorSpec

SECOND_PREFIX = "second."  # prefix of the second network's tensor names, in a model of two networks
KNOWN_DATATYPES = (*NUMPY_TYPES, BYTES)


def _check_datatype(name: str) -> str:
    if name not in KNOWN_DATATYPES:
        raise ValueError(f"must be one of {', '.join(KNOWN_DATATYPES)}")
    return name


class DeclaredTensor(Section):
    """An input or output declared in model.yaml."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    datatype: Annotated[str, AfterValidator(_check_datatype)]
    shape: Annotated[tuple[Annotated[int, Field(ge=-1)], ...], Field(max_length=32)]  # -1: any size

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.datatype, self.shape)


def _check_names_differ(tensors: tuple[DeclaredTensor, ...]) -> tuple[DeclaredTensor, ...]:
    names = [tensor.name for tensor in tensors]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"'{twice}' is declared twice")
    return tensors


Tensors = Annotated[tuple[DeclaredTensor, ...], Field(max_length=1024), AfterValidator(_check_names_differ)]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The form in which an engine wants rows of token ids from text tasks. Tensor requests follow `inputs` instead."""

    length_step: int = 1  # batch lengths are rounded up to a multiple of this, up to the task's longest length
    # Ids are int32, with PADDING for missing ids instead of a mask, and token types are passed only for pairs. Only
    # text tasks pass int32, and they check the ids.
    is_marked: bool = False
    vocabulary: int = 0  # ids must be below this; 0: the engine checks ids itself
    types: int = 0  # token types must be below this; 0: the engine checks them itself


PADDING = -1
GPU_ROWS = TokenRows(length_step=16)  # few distinct shapes, and full tiles for GPU kernels


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a loaded model. A dimension that the file leaves open is -1."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str
    precision: str  # in use: fp32, fp16, bf16, int8, …
    device: str = "cpu"  # in use: `auto` is resolved
    note: str = ""  # for people: how precision, device and engine were chosen
    token_rows: TokenRows = TokenRows()
    tile: int = 0  # side length in pixels of the image tiles that the device processes; 0: the task's option


@dataclass(frozen=True, slots=True)
class ImageWork:
    """Steps before and after an image network, which the engine may run on its device in place of the task."""

    scale: int  # the factor by which images are enlarged before the network
    overlap: int  # pixels repeated around an image
    is_for_colors: bool = False  # the network processes every colour plane instead of the luminance only
