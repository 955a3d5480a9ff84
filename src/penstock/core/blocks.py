"""A block: an addressable deployment of one version of a model; how others see it, and the manager of them all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from penstock.core.settings import BlockSettings
from penstock.core.tensors import TensorSpec


class BlockState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    UNLOADED = "unloaded"
    DORMANT = "dormant"  # deployed, but in no worker's memory: the first request loads it


@dataclass(frozen=True, slots=True)
class BlockDescription:
    """What a worker tells of a block that it holds ready."""

    block_id: str
    model: str
    version: str
    platform: str  # as the protocol's metadata says it: onnxruntime_onnx, openvino
    precision: str  # what `auto` became
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int  # 0: the first dimension is no batch
    instances: int
    settings: BlockSettings
    device: str = "cpu"  # what `auto` became
    fingerprint: str = ""  # of the model's files: answers of other files are not this block's
    is_described: bool = True  # False: never loaded yet, so its inputs and outputs are not known


@dataclass(frozen=True, slots=True)
class BlockView:
    """What a gateway knows of a block of its cluster."""

    block_id: str
    model: str
    version: str
    state: BlockState
    reason: str
    routing: str = ""  # JSON of core.settings.Routing that stands before the model's own; empty: none
    has_served: bool = False  # since it was deployed
    is_new: bool = False  # others of its model serve until every worker has it


Listener = Callable[[Sequence[BlockView]], None]


class Control(Protocol):
    """What a gateway may ask of the manager."""

    async def load(self, model: str) -> None: ...

    async def unload(self, model: str) -> None: ...

    async def set_routing(self, model: str, routing_json: str) -> None:
        """Routes the model's requests so, on every gateway and over restarts; empty: as its model.yaml says."""
        ...
