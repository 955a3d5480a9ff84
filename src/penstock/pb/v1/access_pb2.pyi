from penstock.pb.v1 import job_pb2 as _job_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DiscoverRequest(_message.Message):
    __slots__ = ("model", "version", "block_id", "session_id", "is_ordered", "zone", "host", "avoid", "caller")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    IS_ORDERED_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    block_id: str
    session_id: str
    is_ordered: bool
    zone: str
    host: str
    avoid: _containers.RepeatedScalarFieldContainer[str]
    caller: DirectCaller
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., block_id: _Optional[str] = ..., session_id: _Optional[str] = ..., is_ordered: _Optional[bool] = ..., zone: _Optional[str] = ..., host: _Optional[str] = ..., avoid: _Optional[_Iterable[str]] = ..., caller: _Optional[_Union[DirectCaller, _Mapping]] = ...) -> None: ...

class DirectCaller(_message.Message):
    __slots__ = ("name", "key_id", "scopes", "models", "blocks", "limits", "expires_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    key_id: str
    scopes: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedScalarFieldContainer[str]
    blocks: _containers.RepeatedScalarFieldContainer[str]
    limits: LimitsOfKey
    expires_at: float
    def __init__(self, name: _Optional[str] = ..., key_id: _Optional[str] = ..., scopes: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[str]] = ..., blocks: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[LimitsOfKey, _Mapping]] = ..., expires_at: _Optional[float] = ...) -> None: ...

class DiscoverResponse(_message.Message):
    __slots__ = ("failure", "address", "token", "expires_at", "block_id", "worker_id", "gateway_id", "is_tls", "is_idempotent", "lives_s")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    IS_TLS_FIELD_NUMBER: _ClassVar[int]
    IS_IDEMPOTENT_FIELD_NUMBER: _ClassVar[int]
    LIVES_S_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    address: str
    token: str
    expires_at: float
    block_id: str
    worker_id: str
    gateway_id: str
    is_tls: bool
    is_idempotent: bool
    lives_s: float
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., address: _Optional[str] = ..., token: _Optional[str] = ..., expires_at: _Optional[float] = ..., block_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., gateway_id: _Optional[str] = ..., is_tls: _Optional[bool] = ..., is_idempotent: _Optional[bool] = ..., lives_s: _Optional[float] = ...) -> None: ...

class KeySpec(_message.Message):
    __slots__ = ("name", "scopes", "models", "blocks", "expires_at", "limits")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    name: str
    scopes: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedScalarFieldContainer[str]
    blocks: _containers.RepeatedScalarFieldContainer[str]
    expires_at: float
    limits: LimitsOfKey
    def __init__(self, name: _Optional[str] = ..., scopes: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[str]] = ..., blocks: _Optional[_Iterable[str]] = ..., expires_at: _Optional[float] = ..., limits: _Optional[_Union[LimitsOfKey, _Mapping]] = ...) -> None: ...

class LimitsOfKey(_message.Message):
    __slots__ = ("requests_per_s", "rows_per_s", "tokens_per_s", "burst_s", "concurrency")
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BURST_S_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    requests_per_s: float
    rows_per_s: float
    tokens_per_s: float
    burst_s: float
    concurrency: int
    def __init__(self, requests_per_s: _Optional[float] = ..., rows_per_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., burst_s: _Optional[float] = ..., concurrency: _Optional[int] = ...) -> None: ...

class KeyStatus(_message.Message):
    __slots__ = ("key_id", "spec", "state", "created_at", "created_by", "revoked_at", "rotated_at", "old_until", "etag")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CREATED_BY_FIELD_NUMBER: _ClassVar[int]
    REVOKED_AT_FIELD_NUMBER: _ClassVar[int]
    ROTATED_AT_FIELD_NUMBER: _ClassVar[int]
    OLD_UNTIL_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    spec: KeySpec
    state: str
    created_at: float
    created_by: str
    revoked_at: float
    rotated_at: float
    old_until: float
    etag: str
    def __init__(self, key_id: _Optional[str] = ..., spec: _Optional[_Union[KeySpec, _Mapping]] = ..., state: _Optional[str] = ..., created_at: _Optional[float] = ..., created_by: _Optional[str] = ..., revoked_at: _Optional[float] = ..., rotated_at: _Optional[float] = ..., old_until: _Optional[float] = ..., etag: _Optional[str] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: KeySpec
    def __init__(self, spec: _Optional[_Union[KeySpec, _Mapping]] = ...) -> None: ...

class CreateKeyResponse(_message.Message):
    __slots__ = ("failure", "key", "text")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    key: KeyStatus
    text: str
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., key: _Optional[_Union[KeyStatus, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("failure", "keys", "are_required")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ARE_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    keys: _containers.RepeatedCompositeFieldContainer[KeyStatus]
    are_required: bool
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[KeyStatus, _Mapping]]] = ..., are_required: _Optional[bool] = ...) -> None: ...

class GetKeyRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class GetKeyResponse(_message.Message):
    __slots__ = ("failure", "key")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    key: KeyStatus
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., key: _Optional[_Union[KeyStatus, _Mapping]] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("key", "expected")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    key: str
    expected: str
    def __init__(self, key: _Optional[str] = ..., expected: _Optional[str] = ...) -> None: ...

class RevokeKeyResponse(_message.Message):
    __slots__ = ("failure", "key")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    key: KeyStatus
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., key: _Optional[_Union[KeyStatus, _Mapping]] = ...) -> None: ...

class RotateKeyRequest(_message.Message):
    __slots__ = ("key", "grace_s", "expected")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    key: str
    grace_s: float
    expected: str
    def __init__(self, key: _Optional[str] = ..., grace_s: _Optional[float] = ..., expected: _Optional[str] = ...) -> None: ...

class RotateKeyResponse(_message.Message):
    __slots__ = ("failure", "key", "text")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    key: KeyStatus
    text: str
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., key: _Optional[_Union[KeyStatus, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class ChangeKeyRequest(_message.Message):
    __slots__ = ("key", "changes", "expected")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    key: str
    changes: str
    expected: str
    def __init__(self, key: _Optional[str] = ..., changes: _Optional[str] = ..., expected: _Optional[str] = ...) -> None: ...

class ChangeKeyResponse(_message.Message):
    __slots__ = ("failure", "key")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    key: KeyStatus
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., key: _Optional[_Union[KeyStatus, _Mapping]] = ...) -> None: ...

class RotateSigningRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RotateSigningResponse(_message.Message):
    __slots__ = ("failure", "kid", "signs_from")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    KID_FIELD_NUMBER: _ClassVar[int]
    SIGNS_FROM_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    kid: str
    signs_from: float
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., kid: _Optional[str] = ..., signs_from: _Optional[float] = ...) -> None: ...

class ListAuditRequest(_message.Message):
    __slots__ = ("after", "limit", "who", "before")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    after: int
    limit: int
    who: str
    before: int
    def __init__(self, after: _Optional[int] = ..., limit: _Optional[int] = ..., who: _Optional[str] = ..., before: _Optional[int] = ...) -> None: ...

class ListAuditResponse(_message.Message):
    __slots__ = ("failure", "entries")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ...) -> None: ...

class AuditEntry(_message.Message):
    __slots__ = ("number", "at", "who", "what", "changes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    number: int
    at: float
    who: str
    what: str
    changes: _containers.RepeatedCompositeFieldContainer[AuditChange]
    def __init__(self, number: _Optional[int] = ..., at: _Optional[float] = ..., who: _Optional[str] = ..., what: _Optional[str] = ..., changes: _Optional[_Iterable[_Union[AuditChange, _Mapping]]] = ...) -> None: ...

class AuditChange(_message.Message):
    __slots__ = ("key", "before", "after")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    key: str
    before: str
    after: str
    def __init__(self, key: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ...) -> None: ...
