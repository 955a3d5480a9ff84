from penstock.pb.v1 import job_pb2 as _job_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BeginUpload(_message.Message):
    __slots__ = ("manifest", "facts")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    facts: bytes
    def __init__(self, manifest: _Optional[bytes] = ..., facts: _Optional[bytes] = ...) -> None: ...

class UploadState(_message.Message):
    __slots__ = ("failure", "upload_id", "files", "is_committed")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    IS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    upload_id: str
    files: _containers.RepeatedCompositeFieldContainer[FileOffset]
    is_committed: bool
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., upload_id: _Optional[str] = ..., files: _Optional[_Iterable[_Union[FileOffset, _Mapping]]] = ..., is_committed: _Optional[bool] = ...) -> None: ...

class FileOffset(_message.Message):
    __slots__ = ("sha256", "offset", "size_bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    offset: int
    size_bytes: int
    def __init__(self, sha256: _Optional[str] = ..., offset: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class UploadChunk(_message.Message):
    __slots__ = ("start", "data")
    START_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: UploadStart
    data: bytes
    def __init__(self, start: _Optional[_Union[UploadStart, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadStart(_message.Message):
    __slots__ = ("upload_id", "sha256", "offset")
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    upload_id: str
    sha256: str
    offset: int
    def __init__(self, upload_id: _Optional[str] = ..., sha256: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class CommitUpload(_message.Message):
    __slots__ = ("upload_id",)
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    upload_id: str
    def __init__(self, upload_id: _Optional[str] = ...) -> None: ...

class AbortUpload(_message.Message):
    __slots__ = ("upload_id",)
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    upload_id: str
    def __init__(self, upload_id: _Optional[str] = ...) -> None: ...

class FindVersion(_message.Message):
    __slots__ = ("reference",)
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    reference: str
    def __init__(self, reference: _Optional[str] = ...) -> None: ...

class VersionResponse(_message.Message):
    __slots__ = ("failure", "version")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    version: ModelVersion
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., version: _Optional[_Union[ModelVersion, _Mapping]] = ...) -> None: ...

class ModelVersion(_message.Message):
    __slots__ = ("model", "version", "digest", "size_bytes", "files", "created_at", "facts", "aliases", "blocks")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    digest: str
    size_bytes: int
    files: int
    created_at: str
    facts: bytes
    aliases: _containers.RepeatedScalarFieldContainer[str]
    blocks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., files: _Optional[int] = ..., created_at: _Optional[str] = ..., facts: _Optional[bytes] = ..., aliases: _Optional[_Iterable[str]] = ..., blocks: _Optional[_Iterable[str]] = ...) -> None: ...

class ListVersions(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("failure", "versions")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    versions: _containers.RepeatedCompositeFieldContainer[ModelVersion]
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., versions: _Optional[_Iterable[_Union[ModelVersion, _Mapping]]] = ...) -> None: ...

class DeleteVersion(_message.Message):
    __slots__ = ("model", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class SetAliasRequest(_message.Message):
    __slots__ = ("model", "alias", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    alias: str
    version: str
    def __init__(self, model: _Optional[str] = ..., alias: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class RegistryResponse(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("sha256", "offset", "is_manifest")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    IS_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    offset: int
    is_manifest: bool
    def __init__(self, sha256: _Optional[str] = ..., offset: _Optional[int] = ..., is_manifest: _Optional[bool] = ...) -> None: ...

class DownloadChunk(_message.Message):
    __slots__ = ("failure", "data")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    failure: _job_pb2.Failure
    data: bytes
    def __init__(self, failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...
