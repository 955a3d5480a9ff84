"""A block: an addressable deployment of one version of a model."""

from dataclasses import dataclass
from enum import StrEnum

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
