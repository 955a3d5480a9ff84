from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class LeaderRequest(_message.Message):
    __slots__ = ("history", "epoch")
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    history: str
    epoch: int
    def __init__(self, history: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class LeaderResponse(_message.Message):
    __slots__ = ("manager_id", "is_leader", "leader", "epoch", "managers", "history")
    MANAGER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LEADER_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANAGERS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    manager_id: str
    is_leader: bool
    leader: str
    epoch: int
    managers: _containers.RepeatedScalarFieldContainer[str]
    history: str
    def __init__(self, manager_id: _Optional[str] = ..., is_leader: _Optional[bool] = ..., leader: _Optional[str] = ..., epoch: _Optional[int] = ..., managers: _Optional[_Iterable[str]] = ..., history: _Optional[str] = ...) -> None: ...
