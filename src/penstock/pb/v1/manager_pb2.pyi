from penstock.pb.v1 import job_pb2 as _job_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerReport(_message.Message):
    __slots__ = ("worker_id", "pid", "blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pid: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockState]
    def __init__(self, worker_id: _Optional[str] = ..., pid: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockState, _Mapping]]] = ...) -> None: ...

class BlockState(_message.Message):
    __slots__ = ("block_id", "state", "reason", "revision", "is_serving")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    IS_SERVING_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    state: str
    reason: str
    revision: int
    is_serving: bool
    def __init__(self, block_id: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., revision: _Optional[int] = ..., is_serving: _Optional[bool] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("gateways", "blocks")
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    gateways: _containers.RepeatedScalarFieldContainer[str]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockAssignment]
    def __init__(self, gateways: _Optional[_Iterable[str]] = ..., blocks: _Optional[_Iterable[_Union[BlockAssignment, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("gateway_id", "endpoint")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    endpoint: str
    def __init__(self, gateway_id: _Optional[str] = ..., endpoint: _Optional[str] = ...) -> None: ...

class ClusterView(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockView]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockView, _Mapping]]] = ...) -> None: ...

class BlockView(_message.Message):
    __slots__ = ("block_id", "model", "version", "state", "reason", "routing", "has_served", "is_new")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    HAS_SERVED_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    block_id: str
    model: str
    version: str
    state: str
    reason: str
    routing: str
    has_served: bool
    is_new: bool
    def __init__(self, block_id: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., routing: _Optional[str] = ..., has_served: _Optional[bool] = ..., is_new: _Optional[bool] = ...) -> None: ...

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
