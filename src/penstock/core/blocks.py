"""A block: an addressable deployment of one version of a model; how others see it, and the manager of them all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from penstock.core.cluster.access_view import NO_KEYS, AccessView
from penstock.core.routes import NameRoute
from penstock.core.settings import BlockSettings
from penstock.core.tensors import TensorSpec


class BlockState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    UNLOADED = "unloaded"
    DORMANT = "dormant"  # deployed, but in no worker's memory: the first request loads it


SERVABLE = (BlockState.READY, BlockState.DORMANT)


class BlockRole(StrEnum):
    CHOSEN = "chosen"  # by the newest deployment of its model
    SPARE = "spare"  # stands in while what was chosen is not there, and where it does not load
    WITHDRAWN = "withdrawn"  # unloaded; stays so over restarts until it is loaded


class StoredValue(BaseModel):
    """What lies in the metadata store as JSON; a later version of Penstock may have written more."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Resources(StoredValue):
    """What one replica takes of its worker; 0: nothing that counts."""

    cpu: Annotated[float, Field(ge=0)] = 0.0  # cores
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    gpu_memory_bytes: Annotated[int, Field(ge=0)] = 0


class BlockRecord(StoredValue):
    """What is wanted of a block."""

    model: Annotated[str, Field(min_length=1, max_length=128)]
    version: Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
    source: str = ""  # a model's folder, or `registry`
    role: BlockRole = BlockRole.SPARE
    replicas: Annotated[int, Field(ge=0)] = 0  # 0: on every worker that may hold it
    resources: Resources = Resources()
    labels: dict[str, str] = {}  # of the workers that may hold it; of an empty value the key alone
    anti_affinity: tuple[str, ...] = ()  # names of blocks that no worker holds beside it
    metadata: dict[str, Any] = {}  # what people and queries find it by
    weight: Annotated[float, Field(ge=0)] = 1.0
    # The store's revision of the write that had it loaded anew; 0: of this one. What else changes reloads nothing.
    generation: Annotated[int, Field(ge=0)] = 0


class WorkerRecord(StoredValue):
    """What an operator wants of a worker."""

    is_draining: bool = False  # it gets no more blocks, and those that it has go elsewhere
    removed: str = ""  # the incarnation that gets nothing more to do
    labels: dict[str, str] = {}  # laid over those that it tells itself


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
    note: str = ""  # how it came to run so, for people


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


class GatewayMember(NamedTuple):
    gateway_id: str
    endpoint: str  # where workers and other gateways reach it
    address: str = ""  # where clients do, over gRPC


@dataclass(frozen=True, slots=True)
class ClusterPicture:
    """What a gateway has heard of its cluster from the manager."""

    blocks: Sequence[BlockView]
    gateways: Sequence[GatewayMember] = ()
    membership: int = 0  # the revision of the list of gateways: who owns a session is found by it
    routes: Sequence[NameRoute] = ()
    access: AccessView = NO_KEYS  # the same object for as long as nothing of it is another
    workers_keys: Sequence[str] = ()  # the public keys by which gateways let workers in


Listener = Callable[[ClusterPicture], None]


class Control(Protocol):
    """What a gateway may ask of the manager, for whom it is by name."""

    async def load(self, model: str, asked_by: str) -> None: ...

    async def unload(self, model: str, asked_by: str) -> None: ...

    async def set_routing(self, model: str, routing_json: str, asked_by: str) -> None:
        """Routes the model's requests so, on every gateway and over restarts; empty: as its model.yaml says."""
        ...
