"""The engine protocol: load, warm up, infer, close."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.core.signature import Signature
from penstock.core.tensors import Array


@dataclass(frozen=True, slots=True)
class EngineSpec:
    file: Path
    precision: str  # auto, fp32, bf16
    threads: int
    instances: int
    device: str = "cpu"  # auto, cpu, cuda, cuda:1, mps


class Engine(Protocol):
    """`infer` is called from one thread per instance at a time, several instances in parallel.

    Instances are numbered from 0; one more, with the number `instances`, is for quick batches on the worker's loop.

    BYTES tensors are object arrays of str or bytes, BF16 arrays have ml_dtypes.bfloat16.
    Failures are EngineFailed, or InvalidTensor where the input is at fault.
    """

    def load(self) -> Signature: ...

    def warm_up(self, inputs: Mapping[str, Array]) -> None: ...

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]: ...

    def close(self) -> None: ...
