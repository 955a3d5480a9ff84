from penstock.pb.v1 import access_pb2 as _access_pb2
from penstock.pb.v1 import job_pb2 as _job_pb2
from penstock.pb.v1 import manager_pb2 as _manager_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("failure", "manager_id", "is_leader", "leader", "epoch", "revision", "managers", "gateways", "membership", "workers", "blocks")
    class WorkersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class BlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    MANAGER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LEADER_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MANAGERS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    manager_id: str
    is_leader: bool
    leader: str
    epoch: int
    revision: int
    managers: _containers.RepeatedCompositeFieldContainer[ManagerStatus]
    gateways: _containers.RepeatedCompositeFieldContainer[_manager_pb2.GatewayMember]
    membership: int
    workers: _containers.ScalarMap[str, int]
    blocks: _containers.ScalarMap[str, int]
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., manager_id: _Optional[str] = ..., is_leader: _Optional[bool] = ..., leader: _Optional[str] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ..., managers: _Optional[_Iterable[_Union[ManagerStatus, _Mapping]]] = ..., gateways: _Optional[_Iterable[_Union[_manager_pb2.GatewayMember, _Mapping]]] = ..., membership: _Optional[int] = ..., workers: _Optional[_Mapping[str, int]] = ..., blocks: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ManagerStatus(_message.Message):
    __slots__ = ("manager_id", "address", "is_leader")
    MANAGER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_LEADER_FIELD_NUMBER: _ClassVar[int]
    manager_id: str
    address: str
    is_leader: bool
    def __init__(self, manager_id: _Optional[str] = ..., address: _Optional[str] = ..., is_leader: _Optional[bool] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("failure", "workers")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "state", "incarnation", "pid", "facts", "load", "silent_s", "is_draining", "is_removed", "blocks", "etag")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    incarnation: str
    pid: int
    facts: _manager_pb2.WorkerFacts
    load: _manager_pb2.WorkerLoad
    silent_s: float
    is_draining: bool
    is_removed: bool
    blocks: _containers.RepeatedCompositeFieldContainer[_manager_pb2.BlockState]
    etag: str
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., facts: _Optional[_Union[_manager_pb2.WorkerFacts, _Mapping]] = ..., load: _Optional[_Union[_manager_pb2.WorkerLoad, _Mapping]] = ..., silent_s: _Optional[float] = ..., is_draining: _Optional[bool] = ..., is_removed: _Optional[bool] = ..., blocks: _Optional[_Iterable[_Union[_manager_pb2.BlockState, _Mapping]]] = ..., etag: _Optional[str] = ...) -> None: ...

class RemoveWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "expected")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    expected: str
    def __init__(self, worker_id: _Optional[str] = ..., expected: _Optional[str] = ...) -> None: ...

class RemoveWorkerResponse(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ...) -> None: ...

class ChangeWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "changes", "expected")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    changes: str
    expected: str
    def __init__(self, worker_id: _Optional[str] = ..., changes: _Optional[str] = ..., expected: _Optional[str] = ...) -> None: ...

class WorkerResponse(_message.Message):
    __slots__ = ("failure", "worker")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    worker: WorkerStatus
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., worker: _Optional[_Union[WorkerStatus, _Mapping]] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("model", "block_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    block_id: str
    def __init__(self, model: _Optional[str] = ..., block_id: _Optional[str] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("failure", "blocks")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    blocks: _containers.RepeatedCompositeFieldContainer[BlockStatus]
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockStatus, _Mapping]]] = ...) -> None: ...

class BlockStatus(_message.Message):
    __slots__ = ("block_id", "spec", "role", "state", "reason", "revision", "holders", "placed", "requests", "errors", "latency_s", "etag", "generation")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    spec: BlockSpec
    role: str
    state: str
    reason: str
    revision: int
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolder]
    placed: _containers.RepeatedScalarFieldContainer[str]
    requests: int
    errors: int
    latency_s: float
    etag: str
    generation: _job_pb2.GenerationStanding
    def __init__(self, block_id: _Optional[str] = ..., spec: _Optional[_Union[BlockSpec, _Mapping]] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., revision: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[BlockHolder, _Mapping]]] = ..., placed: _Optional[_Iterable[str]] = ..., requests: _Optional[int] = ..., errors: _Optional[int] = ..., latency_s: _Optional[float] = ..., etag: _Optional[str] = ..., generation: _Optional[_Union[_job_pb2.GenerationStanding, _Mapping]] = ...) -> None: ...

class BlockHolder(_message.Message):
    __slots__ = ("worker_id", "state", "reason", "is_serving")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_SERVING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    reason: str
    is_serving: bool
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., is_serving: _Optional[bool] = ...) -> None: ...

class BlockSpec(_message.Message):
    __slots__ = ("model", "version", "source", "replicas", "cpu", "memory_bytes", "gpu_memory_bytes", "labels", "anti_affinity", "metadata", "weight")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ANTI_AFFINITY_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    source: str
    replicas: int
    cpu: float
    memory_bytes: int
    gpu_memory_bytes: int
    labels: _containers.ScalarMap[str, str]
    anti_affinity: _containers.RepeatedScalarFieldContainer[str]
    metadata: str
    weight: float
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., source: _Optional[str] = ..., replicas: _Optional[int] = ..., cpu: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., gpu_memory_bytes: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., anti_affinity: _Optional[_Iterable[str]] = ..., metadata: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class DeployBlockRequest(_message.Message):
    __slots__ = ("spec", "is_beside", "wait_s")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    IS_BESIDE_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    spec: BlockSpec
    is_beside: bool
    wait_s: float
    def __init__(self, spec: _Optional[_Union[BlockSpec, _Mapping]] = ..., is_beside: _Optional[bool] = ..., wait_s: _Optional[float] = ...) -> None: ...

class DeployBlockResponse(_message.Message):
    __slots__ = ("failure", "block_ids")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    block_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., block_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RemoveBlockRequest(_message.Message):
    __slots__ = ("block_id", "expected")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    expected: str
    def __init__(self, block_id: _Optional[str] = ..., expected: _Optional[str] = ...) -> None: ...

class RemoveBlockResponse(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ...) -> None: ...

class ChangeBlockRequest(_message.Message):
    __slots__ = ("block_id", "changes", "expected")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    changes: str
    expected: str
    def __init__(self, block_id: _Optional[str] = ..., changes: _Optional[str] = ..., expected: _Optional[str] = ...) -> None: ...

class BlockResponse(_message.Message):
    __slots__ = ("failure", "block")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    block: BlockStatus
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., block: _Optional[_Union[BlockStatus, _Mapping]] = ...) -> None: ...

class ExplainBlockRequest(_message.Message):
    __slots__ = ("block_id",)
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    def __init__(self, block_id: _Optional[str] = ...) -> None: ...

class ExplainBlockResponse(_message.Message):
    __slots__ = ("failure", "sentences")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SENTENCES_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    sentences: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., sentences: _Optional[_Iterable[str]] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("after", "limit", "kind", "subject", "before")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    after: int
    limit: int
    kind: str
    subject: str
    before: int
    def __init__(self, after: _Optional[int] = ..., limit: _Optional[int] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., before: _Optional[int] = ...) -> None: ...

class EventsResponse(_message.Message):
    __slots__ = ("failure", "events")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    events: _containers.RepeatedCompositeFieldContainer[ClusterEvent]
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., events: _Optional[_Iterable[_Union[ClusterEvent, _Mapping]]] = ...) -> None: ...

class ClusterEvent(_message.Message):
    __slots__ = ("number", "at", "kind", "subject", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    at: float
    kind: str
    subject: str
    text: str
    def __init__(self, number: _Optional[int] = ..., at: _Optional[float] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("failure", "gateways")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    gateways: _containers.RepeatedCompositeFieldContainer[GatewaySessions]
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., gateways: _Optional[_Iterable[_Union[GatewaySessions, _Mapping]]] = ...) -> None: ...

class GatewaySessions(_message.Message):
    __slots__ = ("gateway_id", "counts")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    counts: _manager_pb2.SessionCounts
    def __init__(self, gateway_id: _Optional[str] = ..., counts: _Optional[_Union[_manager_pb2.SessionCounts, _Mapping]] = ...) -> None: ...

class WatchClusterRequest(_message.Message):
    __slots__ = ("kinds",)
    KINDS_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kinds: _Optional[_Iterable[str]] = ...) -> None: ...

class ClusterChange(_message.Message):
    __slots__ = ("revision", "epoch", "is_snapshot", "blocks", "workers", "keys", "rollouts", "events", "removed", "metrics")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    epoch: int
    is_snapshot: bool
    blocks: _containers.RepeatedCompositeFieldContainer[BlockStatus]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    keys: _containers.RepeatedCompositeFieldContainer[_access_pb2.KeyStatus]
    rollouts: _containers.RepeatedCompositeFieldContainer[RolloutStatus]
    events: _containers.RepeatedCompositeFieldContainer[ClusterEvent]
    removed: _containers.RepeatedScalarFieldContainer[str]
    metrics: str
    def __init__(self, revision: _Optional[int] = ..., epoch: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., blocks: _Optional[_Iterable[_Union[BlockStatus, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[_access_pb2.KeyStatus, _Mapping]]] = ..., rollouts: _Optional[_Iterable[_Union[RolloutStatus, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[ClusterEvent, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ..., metrics: _Optional[str] = ...) -> None: ...

class StartRolloutRequest(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: str
    def __init__(self, plan: _Optional[str] = ...) -> None: ...

class ChangeRolloutRequest(_message.Message):
    __slots__ = ("name", "expected")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    expected: str
    def __init__(self, name: _Optional[str] = ..., expected: _Optional[str] = ...) -> None: ...

class RolloutResponse(_message.Message):
    __slots__ = ("failure", "rollout")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    rollout: RolloutStatus
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., rollout: _Optional[_Union[RolloutStatus, _Mapping]] = ...) -> None: ...

class ListRolloutsRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListRolloutsResponse(_message.Message):
    __slots__ = ("failure", "rollouts")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    rollouts: _containers.RepeatedCompositeFieldContainer[RolloutStatus]
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., rollouts: _Optional[_Iterable[_Union[RolloutStatus, _Mapping]]] = ...) -> None: ...

class RolloutStatus(_message.Message):
    __slots__ = ("name", "phase", "is_paused", "weight", "step", "steps", "reason", "answers", "missing_answers", "left_s", "old", "new", "began", "plan", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    MISSING_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    phase: str
    is_paused: bool
    weight: float
    step: int
    steps: int
    reason: str
    answers: int
    missing_answers: int
    left_s: float
    old: RolledBlockStatus
    new: RolledBlockStatus
    began: float
    plan: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., phase: _Optional[str] = ..., is_paused: _Optional[bool] = ..., weight: _Optional[float] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., reason: _Optional[str] = ..., answers: _Optional[int] = ..., missing_answers: _Optional[int] = ..., left_s: _Optional[float] = ..., old: _Optional[_Union[RolledBlockStatus, _Mapping]] = ..., new: _Optional[_Union[RolledBlockStatus, _Mapping]] = ..., began: _Optional[float] = ..., plan: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class RolledBlockStatus(_message.Message):
    __slots__ = ("block_id", "model", "version", "outcomes", "errors", "p50_s", "p95_s")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P95_S_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    model: str
    version: str
    outcomes: int
    errors: int
    p50_s: float
    p95_s: float
    def __init__(self, block_id: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., outcomes: _Optional[int] = ..., errors: _Optional[int] = ..., p50_s: _Optional[float] = ..., p95_s: _Optional[float] = ...) -> None: ...

class PushPolicyRequest(_message.Message):
    __slots__ = ("name", "code", "description")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    code: bytes
    description: str
    def __init__(self, name: _Optional[str] = ..., code: _Optional[bytes] = ..., description: _Optional[str] = ...) -> None: ...

class PushPolicyResponse(_message.Message):
    __slots__ = ("failure", "policy")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    policy: PolicyStatus
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., policy: _Optional[_Union[PolicyStatus, _Mapping]] = ...) -> None: ...

class ListPoliciesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPoliciesResponse(_message.Message):
    __slots__ = ("failure", "policies")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    policies: _containers.RepeatedCompositeFieldContainer[PolicyStatus]
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., policies: _Optional[_Iterable[_Union[PolicyStatus, _Mapping]]] = ...) -> None: ...

class DeletePolicyRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeletePolicyResponse(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ...) -> None: ...

class PolicyStatus(_message.Message):
    __slots__ = ("name", "sha256", "size_bytes", "description", "created_at", "created_by")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CREATED_BY_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: str
    size_bytes: int
    description: str
    created_at: float
    created_by: str
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ..., description: _Optional[str] = ..., created_at: _Optional[float] = ..., created_by: _Optional[str] = ...) -> None: ...
