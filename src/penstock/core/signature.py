"""What a model file takes and gives, as its engine read it."""

from dataclasses import dataclass

from penstock.core.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Signature:
    """A dimension that the file leaves open is -1."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str
    precision: str  # what really runs: fp32, fp16, bf16, int8, …
    device: str = "cpu"  # what `auto` became
    note: str = ""  # how it came to run so, for people: what was chosen, built or found
