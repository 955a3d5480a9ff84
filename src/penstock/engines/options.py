"""What model.yaml says to the engines whose files do not tell everything, a section each."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.core.manifest import Tensors
from penstock.core.settings import Section


class PythonOptions(Section):
    """What a Python model takes and gives."""

    class_name: str = "Model"
    inputs: Tensors = ()
    outputs: Tensors = ()
    is_decoupled: bool = False  # gives any number of answers to one request
    memory_mb: Annotated[int, Field(ge=64)] | Literal["auto", "none"] = "auto"  # of one instance; auto: see docs


class TorchOptions(Section):
    """What a PyTorch file does not tell of itself."""

    inputs: Tensors = ()  # in the order of its arguments; a TorchScript file needs them
    outputs: Tensors = ()
    compile: bool = False  # torch.compile, which takes minutes with the first requests


class GenaiOptions(Section):
    """How OpenVINO GenAI generates: what it may take of the machine."""

    cache_mb: Annotated[int, Field(ge=16)] = 1024  # of keys and values, for all sequences together
    max_batched_tokens: Annotated[int, Field(ge=16, le=65_536)] = 256  # that one step computes
    prefix_caching: bool = True  # what begins like an earlier prompt is not computed again
    nice: Annotated[int, Field(ge=0, le=19)] = 0  # 19: computes only when nobody else wants to
