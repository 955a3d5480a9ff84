from penstock.pb.v1 import job_pb2 as _job_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerReport(_message.Message):
    __slots__ = ("worker_id", "pid", "blocks", "incarnation", "is_snapshot", "removed", "epoch", "revision", "facts", "load", "is_leaving", "is_lost", "history")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    IS_LOST_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pid: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockState]
    incarnation: str
    is_snapshot: bool
    removed: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    revision: int
    facts: WorkerFacts
    load: WorkerLoad
    is_leaving: bool
    is_lost: bool
    history: str
    def __init__(self, worker_id: _Optional[str] = ..., pid: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockState, _Mapping]]] = ..., incarnation: _Optional[str] = ..., is_snapshot: _Optional[bool] = ..., removed: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ..., facts: _Optional[_Union[WorkerFacts, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., is_leaving: _Optional[bool] = ..., is_lost: _Optional[bool] = ..., history: _Optional[str] = ...) -> None: ...

class WorkerFacts(_message.Message):
    __slots__ = ("node", "host", "zone", "labels", "cpus", "memory_bytes", "gpu_memory_bytes", "version", "shared", "weight", "curve_key", "door", "is_door_tls")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEY_FIELD_NUMBER: _ClassVar[int]
    DOOR_FIELD_NUMBER: _ClassVar[int]
    IS_DOOR_TLS_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    zone: str
    labels: _containers.ScalarMap[str, str]
    cpus: float
    memory_bytes: int
    gpu_memory_bytes: int
    version: str
    shared: _containers.RepeatedCompositeFieldContainer[SharedCapacity]
    weight: float
    curve_key: str
    door: str
    is_door_tls: bool
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., zone: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., cpus: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., gpu_memory_bytes: _Optional[int] = ..., version: _Optional[str] = ..., shared: _Optional[_Iterable[_Union[SharedCapacity, _Mapping]]] = ..., weight: _Optional[float] = ..., curve_key: _Optional[str] = ..., door: _Optional[str] = ..., is_door_tls: _Optional[bool] = ...) -> None: ...

class SharedCapacity(_message.Message):
    __slots__ = ("name", "cpus", "memory_bytes", "gpu_memory_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    cpus: float
    memory_bytes: int
    gpu_memory_bytes: int
    def __init__(self, name: _Optional[str] = ..., cpus: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., gpu_memory_bytes: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("cpu", "memory_bytes", "gpu", "gpu_memory_bytes", "jobs", "waiting", "busy", "instances", "counts", "devices")
    CPU_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    cpu: float
    memory_bytes: int
    gpu: float
    gpu_memory_bytes: int
    jobs: int
    waiting: int
    busy: int
    instances: int
    counts: _containers.RepeatedCompositeFieldContainer[BlockCounts]
    devices: _containers.RepeatedCompositeFieldContainer[_job_pb2.DeviceUse]
    def __init__(self, cpu: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., gpu: _Optional[float] = ..., gpu_memory_bytes: _Optional[int] = ..., jobs: _Optional[int] = ..., waiting: _Optional[int] = ..., busy: _Optional[int] = ..., instances: _Optional[int] = ..., counts: _Optional[_Iterable[_Union[BlockCounts, _Mapping]]] = ..., devices: _Optional[_Iterable[_Union[_job_pb2.DeviceUse, _Mapping]]] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("block_id", "requests", "errors", "latency_s", "generation")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    requests: int
    errors: int
    latency_s: float
    generation: _job_pb2.GenerationStanding
    def __init__(self, block_id: _Optional[str] = ..., requests: _Optional[int] = ..., errors: _Optional[int] = ..., latency_s: _Optional[float] = ..., generation: _Optional[_Union[_job_pb2.GenerationStanding, _Mapping]] = ...) -> None: ...

class AnswerCounts(_message.Message):
    __slots__ = ("block_id", "answers", "errors", "latencies", "waiting", "is_control")
    class ErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LatenciesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class WaitingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    IS_CONTROL_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    answers: int
    errors: _containers.ScalarMap[str, int]
    latencies: _containers.ScalarMap[int, int]
    waiting: _containers.ScalarMap[int, int]
    is_control: bool
    def __init__(self, block_id: _Optional[str] = ..., answers: _Optional[int] = ..., errors: _Optional[_Mapping[str, int]] = ..., latencies: _Optional[_Mapping[int, int]] = ..., waiting: _Optional[_Mapping[int, int]] = ..., is_control: _Optional[bool] = ...) -> None: ...

class BlockState(_message.Message):
    __slots__ = ("block_id", "state", "reason", "revision", "is_serving", "is_new")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    IS_SERVING_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    state: str
    reason: str
    revision: int
    is_serving: bool
    is_new: bool
    def __init__(self, block_id: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., revision: _Optional[int] = ..., is_serving: _Optional[bool] = ..., is_new: _Optional[bool] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("gateways", "blocks", "epoch", "revision", "is_snapshot", "since", "removed", "has_gateways", "history", "tokens", "opens_door")
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    HAS_GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPENS_DOOR_FIELD_NUMBER: _ClassVar[int]
    gateways: _containers.RepeatedScalarFieldContainer[str]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockAssignment]
    epoch: int
    revision: int
    is_snapshot: bool
    since: int
    removed: _containers.RepeatedScalarFieldContainer[str]
    has_gateways: bool
    history: str
    tokens: TokenFacts
    opens_door: bool
    def __init__(self, gateways: _Optional[_Iterable[str]] = ..., blocks: _Optional[_Iterable[_Union[BlockAssignment, _Mapping]]] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., since: _Optional[int] = ..., removed: _Optional[_Iterable[str]] = ..., has_gateways: _Optional[bool] = ..., history: _Optional[str] = ..., tokens: _Optional[_Union[TokenFacts, _Mapping]] = ..., opens_door: _Optional[bool] = ...) -> None: ...

class TokenFacts(_message.Message):
    __slots__ = ("is_asking", "signers", "revoked", "expires_at", "clock")
    class ExpiresAtEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    IS_ASKING_FIELD_NUMBER: _ClassVar[int]
    SIGNERS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    is_asking: bool
    signers: _containers.RepeatedCompositeFieldContainer[TokenSigner]
    revoked: _containers.RepeatedScalarFieldContainer[str]
    expires_at: _containers.ScalarMap[str, float]
    clock: float
    def __init__(self, is_asking: _Optional[bool] = ..., signers: _Optional[_Iterable[_Union[TokenSigner, _Mapping]]] = ..., revoked: _Optional[_Iterable[str]] = ..., expires_at: _Optional[_Mapping[str, float]] = ..., clock: _Optional[float] = ...) -> None: ...

class TokenSigner(_message.Message):
    __slots__ = ("kid", "public")
    KID_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    kid: str
    public: bytes
    def __init__(self, kid: _Optional[str] = ..., public: _Optional[bytes] = ...) -> None: ...

class BlockAssignment(_message.Message):
    __slots__ = ("block_id", "model", "version", "folder", "revision", "replaces", "is_new")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    model: str
    version: str
    folder: str
    revision: int
    replaces: _containers.RepeatedScalarFieldContainer[str]
    is_new: bool
    def __init__(self, block_id: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., folder: _Optional[str] = ..., revision: _Optional[int] = ..., replaces: _Optional[_Iterable[str]] = ..., is_new: _Optional[bool] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("gateway_id", "endpoint", "incarnation", "address", "epoch", "revision", "counts", "is_leaving", "is_lost", "answers", "history", "sessions")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    IS_LOST_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    endpoint: str
    incarnation: str
    address: str
    epoch: int
    revision: int
    counts: _containers.RepeatedCompositeFieldContainer[AnswerCounts]
    is_leaving: bool
    is_lost: bool
    answers: _containers.RepeatedCompositeFieldContainer[ModelAnswers]
    history: str
    sessions: SessionCounts
    def __init__(self, gateway_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ..., counts: _Optional[_Iterable[_Union[AnswerCounts, _Mapping]]] = ..., is_leaving: _Optional[bool] = ..., is_lost: _Optional[bool] = ..., answers: _Optional[_Iterable[_Union[ModelAnswers, _Mapping]]] = ..., history: _Optional[str] = ..., sessions: _Optional[_Union[SessionCounts, _Mapping]] = ...) -> None: ...

class SessionCounts(_message.Message):
    __slots__ = ("open", "waiting", "repeats", "forwarded")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    open: int
    waiting: int
    repeats: int
    forwarded: int
    def __init__(self, open: _Optional[int] = ..., waiting: _Optional[int] = ..., repeats: _Optional[int] = ..., forwarded: _Optional[int] = ...) -> None: ...

class ModelAnswers(_message.Message):
    __slots__ = ("model", "version", "codes", "buckets", "seconds")
    class CodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    codes: _containers.ScalarMap[str, int]
    buckets: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., codes: _Optional[_Mapping[str, int]] = ..., buckets: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ...) -> None: ...

class ClusterView(_message.Message):
    __slots__ = ("blocks", "epoch", "revision", "is_snapshot", "since", "removed", "routes", "removed_routes", "gateways", "membership", "has_gateways", "history", "access", "keys", "removed_keys", "curve_keys", "has_curve_keys", "records", "removed_records")
    class RecordsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_ROUTES_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    HAS_GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEYS_FIELD_NUMBER: _ClassVar[int]
    HAS_CURVE_KEYS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockView]
    epoch: int
    revision: int
    is_snapshot: bool
    since: int
    removed: _containers.RepeatedScalarFieldContainer[str]
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    removed_routes: _containers.RepeatedScalarFieldContainer[str]
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayMember]
    membership: int
    has_gateways: bool
    history: str
    access: AccessFacts
    keys: _containers.RepeatedCompositeFieldContainer[KnownKey]
    removed_keys: _containers.RepeatedScalarFieldContainer[str]
    curve_keys: _containers.RepeatedScalarFieldContainer[str]
    has_curve_keys: bool
    records: _containers.ScalarMap[str, bytes]
    removed_records: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockView, _Mapping]]] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., since: _Optional[int] = ..., removed: _Optional[_Iterable[str]] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., removed_routes: _Optional[_Iterable[str]] = ..., gateways: _Optional[_Iterable[_Union[GatewayMember, _Mapping]]] = ..., membership: _Optional[int] = ..., has_gateways: _Optional[bool] = ..., history: _Optional[str] = ..., access: _Optional[_Union[AccessFacts, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[KnownKey, _Mapping]]] = ..., removed_keys: _Optional[_Iterable[str]] = ..., curve_keys: _Optional[_Iterable[str]] = ..., has_curve_keys: _Optional[bool] = ..., records: _Optional[_Mapping[str, bytes]] = ..., removed_records: _Optional[_Iterable[str]] = ...) -> None: ...

class AccessFacts(_message.Message):
    __slots__ = ("secret", "is_asking", "signers", "clock")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    IS_ASKING_FIELD_NUMBER: _ClassVar[int]
    SIGNERS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    is_asking: bool
    signers: _containers.RepeatedCompositeFieldContainer[TokenSigner]
    clock: float
    def __init__(self, secret: _Optional[bytes] = ..., is_asking: _Optional[bool] = ..., signers: _Optional[_Iterable[_Union[TokenSigner, _Mapping]]] = ..., clock: _Optional[float] = ...) -> None: ...

class KnownKey(_message.Message):
    __slots__ = ("key_id", "record")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    record: bytes
    def __init__(self, key_id: _Optional[str] = ..., record: _Optional[bytes] = ...) -> None: ...

class BlockView(_message.Message):
    __slots__ = ("block_id", "model", "version", "state", "reason", "routing", "has_served", "is_new", "details")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    HAS_SERVED_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    model: str
    version: str
    state: str
    reason: str
    routing: str
    has_served: bool
    is_new: bool
    details: str
    def __init__(self, block_id: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., routing: _Optional[str] = ..., has_served: _Optional[bool] = ..., is_new: _Optional[bool] = ..., details: _Optional[str] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("name", "shares", "sticky", "key", "shadow", "shadow_share", "is_compared", "trial", "allowance", "began")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    STICKY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    SHADOW_SHARE_FIELD_NUMBER: _ClassVar[int]
    IS_COMPARED_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    ALLOWANCE_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    name: str
    shares: _containers.RepeatedCompositeFieldContainer[WeightedBlock]
    sticky: str
    key: str
    shadow: str
    shadow_share: float
    is_compared: bool
    trial: str
    allowance: int
    began: str
    def __init__(self, name: _Optional[str] = ..., shares: _Optional[_Iterable[_Union[WeightedBlock, _Mapping]]] = ..., sticky: _Optional[str] = ..., key: _Optional[str] = ..., shadow: _Optional[str] = ..., shadow_share: _Optional[float] = ..., is_compared: _Optional[bool] = ..., trial: _Optional[str] = ..., allowance: _Optional[int] = ..., began: _Optional[str] = ...) -> None: ...

class WeightedBlock(_message.Message):
    __slots__ = ("block_id", "weight")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    weight: float
    def __init__(self, block_id: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class GatewayMember(_message.Message):
    __slots__ = ("gateway_id", "address", "endpoint")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    address: str
    endpoint: str
    def __init__(self, gateway_id: _Optional[str] = ..., address: _Optional[str] = ..., endpoint: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ...) -> None: ...

class UnloadRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class UnloadResponse(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ...) -> None: ...

class SetRoutingRequest(_message.Message):
    __slots__ = ("model", "routing")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    model: str
    routing: str
    def __init__(self, model: _Optional[str] = ..., routing: _Optional[str] = ...) -> None: ...

class SetRoutingResponse(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ...) -> None: ...
