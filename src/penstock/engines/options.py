"""What model.yaml says to the engines whose files do not tell everything, a section each."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.core.settings import Section


class TensorOption(Section):
    name: Annotated[str, Field(min_length=1)]
    datatype: str
    shape: tuple[int, ...]  # -1: any size


class PythonOptions(Section):
    """What a Python model takes and gives."""

    class_name: str = "Model"
    inputs: tuple[TensorOption, ...] = ()
    outputs: tuple[TensorOption, ...] = ()
    is_decoupled: bool = False  # gives any number of answers to one request
    memory_mb: Annotated[int, Field(ge=64)] | Literal["auto", "none"] = "auto"  # of one instance; auto: see docs


class TorchOptions(Section):
    """What a PyTorch file does not tell of itself."""

    inputs: tuple[TensorOption, ...] = ()  # in the order of its arguments; a TorchScript file needs them
    outputs: tuple[TensorOption, ...] = ()
    compile: bool = False  # torch.compile, which takes minutes with the first requests
