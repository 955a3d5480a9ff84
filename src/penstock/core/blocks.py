"""Records and descriptions of blocks (deployed models), which workers, gateways and the manager exchange."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from penstock.core.cluster.access_view import NO_KEYS, AccessView
from penstock.core.cluster.routes import NameRoute
from penstock.core.settings import BlockSettings
from penstock.core.tensors import TensorSpec

REGISTRY_SOURCE = "registry:"  # prefix of the source of a block whose files are in the registry; a digest follows


class BlockState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    UNLOADED = "unloaded"
    DORMANT = "dormant"  # deployed, but not in memory on any worker: the first request loads it


SERVABLE = (BlockState.READY, BlockState.DORMANT)


class BlockRole(StrEnum):
    CHOSEN = "chosen"  # the model's current block
    SPARE = "spare"  # serves while the chosen block is missing or fails to load
    WITHDRAWN = "withdrawn"  # unloaded by an operator, also after restarts, until somebody loads it


class StoredValue(BaseModel):
    """Base class of values stored as JSON in the metadata store. Unknown keys, from a newer Penstock, are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Resources(StoredValue):
    """Resources that one replica needs on its worker. 0 means: no noticeable amount."""

    cpu: Annotated[float, Field(ge=0)] = 0.0  # cores
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    gpu_memory_bytes: Annotated[int, Field(ge=0)] = 0


class BlockRecord(StoredValue):
    """The desired state of a block."""

    model: Annotated[str, Field(min_length=1, max_length=128)]
    version: Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
    source: str = ""  # the model's folder, or REGISTRY_SOURCE and the manifest's digest
    role: BlockRole = BlockRole.SPARE
    replicas: Annotated[int, Field(ge=0)] = 0  # 0: one on every worker that may hold the block
    resources: Resources = Resources()
    labels: dict[str, str] = {}  # that a worker must have to hold the block; an empty value requires only the key
    anti_affinity: tuple[str, ...] = ()  # names of blocks that must not be on the same worker
    metadata: dict[str, Any] = {}  # free text for people and for search queries
    weight: Annotated[float, Field(ge=0)] = 1.0
    # The store's revision at the last write that requires a reload. 0: the revision of this record itself.
    generation: Annotated[int, Field(ge=0)] = 0


class WorkerRecord(StoredValue):
    """An operator's settings for a worker."""

    is_draining: bool = False  # the worker gets no more blocks, and its blocks move to other workers
    removed: str = ""  # the incarnation of the worker that was removed and gets no more work
    labels: dict[str, str] = {}  # override the labels that the worker reports


@dataclass(frozen=True, slots=True)
class BlockDescription:
    """A worker's description of a block that it has loaded."""

    block_id: str
    model: str
    version: str
    platform: str  # the value in the protocol's metadata: onnxruntime_onnx, openvino
    precision: str  # the precision in use: `auto` is resolved
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int  # 0: the first dimension is not a batch
    instances: int
    settings: BlockSettings
    device: str = "cpu"  # the device in use: `auto` is resolved
    fingerprint: str = ""  # of the model's files, so that a cache never returns the answer of different files
    is_described: bool = True  # False: not loaded yet, so inputs and outputs are unknown
    note: str = ""  # for people: how precision, device and engine were chosen


class BlockDetails(StoredValue):
    """The part of a block's desired state that search queries read."""

    labels: dict[str, str] = {}
    metadata: dict[str, Any] = {}
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class BlockView:
    """The state of a block, as the manager publishes it to gateways."""

    block_id: str
    model: str
    version: str
    state: BlockState
    reason: str
    routing: str = ""  # JSON of core.settings.Routing that overrides the model's own; empty: no override
    has_served: bool = False  # since the block was deployed
    is_new: bool = False  # the model's previous block serves until every worker has loaded this block
    details: str = ""  # JSON of BlockDetails; empty: none


class GatewayMember(NamedTuple):
    gateway_id: str
    endpoint: str  # for workers and other gateways
    address: str = ""  # for clients, over gRPC


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The state of a cluster as the manager last published it to gateways."""

    blocks: Sequence[BlockView]
    gateways: Sequence[GatewayMember] = ()
    membership: int = 0  # the revision of the list of gateways, from which session owners are computed
    routes: Sequence[NameRoute] = ()
    access: AccessView = NO_KEYS  # a new object when its content changes
    workers_keys: Sequence[str] = ()  # public CURVE keys of the workers that gateways accept
    records: Mapping[str, bytes] = field(default_factory=dict)  # of features, by key; a new object when one changes


OnClusterView = Callable[[ClusterView], None]


class Control(Protocol):
    """Calls of a gateway to its manager. `asked_by` is the name of the client that asked the gateway."""

    async def load(self, model: str, asked_by: str) -> None: ...

    async def unload(self, model: str, asked_by: str) -> None: ...

    async def set_routing(self, model: str, routing_json: str, asked_by: str) -> None:
        """Override a model's routing on every gateway, also after restarts; an empty text removes the override."""
        ...
