"""What model.yaml says to the engines whose files do not tell everything, a section each."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

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
    graphs: bool = True  # on CUDA, of a folder's model: captured as it is loaded, one for each shape of a batch


class GenaiOptions(Section):
    """How OpenVINO GenAI generates: what it may take of the machine."""

    cache_mb: Annotated[int, Field(ge=16)] = 1024  # of keys and values, for all sequences together
    max_batched_tokens: Annotated[int, Field(ge=16, le=65_536)] = 256  # that one step computes
    prefix_caching: bool = True  # what begins like an earlier prompt is not computed again
    nice: Annotated[int, Field(ge=0, le=19)] = 0  # 19: computes only when nobody else wants to


Sizes = tuple[Annotated[int, Field(ge=0)], ...]


def _as_written(given: Any) -> Any:
    """YAML takes 8.9 for a number."""
    if not isinstance(given, list | tuple):
        return given
    return [f"{each:.1f}" if isinstance(each, int | float) else each for each in given]


Capability = Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")]  # a GPU's compute capability: 8.9


class ShapeRange(Section):
    """The sizes of one input: the least, those to be fastest at, and the most."""

    min: Sizes
    opt: Sizes
    max: Sizes

    @model_validator(mode="after")
    def _grows(self) -> "ShapeRange":
        if not len(self.min) == len(self.opt) == len(self.max):
            raise ValueError("min, opt and max have as many sizes each")
        if any(not low <= best <= high for low, best, high in zip(self.min, self.opt, self.max, strict=True)):
            raise ValueError("min is not above opt, and opt not above max")
        return self


class TensorRtOptions(Section):
    """How TensorRT builds an engine of the file."""

    library: Literal["auto", "tensorrt", "tensorrt_rtx"] = "auto"  # auto: TensorRT, else TensorRT-RTX
    shapes: dict[str, ShapeRange] = {}  # noqa: RUF012 - pydantic copies it; of inputs whose sizes nothing else tells
    capabilities: Annotated[
        tuple[Capability, ...], BeforeValidator(_as_written)
    ] = ()  # of GPUs that TensorRT-RTX builds for; none: all that it knows
    optimization_level: Annotated[int, Field(ge=0, le=5)] = 3  # the longer it builds, the faster it may run
    workspace_mb: Annotated[int, Field(ge=1)] | None = None  # scratch memory of one operation; None: the whole GPU's
