"""A connection to a server, and when something was last heard on it."""

import time
from dataclasses import dataclass, field
from typing import Any

import grpc

from penstock.pb.inference import grpc_service_pb2_grpc
from penstock.pb.v1 import access_pb2_grpc


@dataclass(slots=True)
class Connection:
    channel: Any  # of either flavour
    stub: Any = field(init=False)
    heard_at: float = field(default_factory=time.monotonic)
    is_left: bool = False  # whoever waits there waits in vain

    def __post_init__(self) -> None:
        self.stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def method(self, name: str) -> Any:
        """Of inference, or of what leads to workers."""
        return getattr(self.stub if hasattr(self.stub, name) else access_pb2_grpc.DirectStub(self.channel), name)

    def is_dead_after(self, error: grpc.RpcError, began: float) -> bool:
        """Whether nothing came on it since then, where a call ended at its deadline: another may do better."""
        return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self.heard_at < began

    def heard(self) -> None:
        self.heard_at = time.monotonic()
