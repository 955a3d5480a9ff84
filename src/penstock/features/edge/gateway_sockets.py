"""The unix sockets of a gateway behind the edge, in a folder that only this user and the edge can open."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class GatewaySockets:
    """The paths of the sockets. Without `http`, only gRPC is served; without `native`, only grpcio serves gRPC."""

    grpc: str
    http: str = ""
    native: str = ""

    @classmethod
    def of(cls, folder: "Path", name: str, is_native: bool, has_http: bool = True) -> "GatewaySockets":
        """Return the sockets of a gateway; `has_http` is False for a worker's direct endpoint."""
        place = folder / name
        http, native = f"{place}-http" if has_http else "", f"{place}-native" if is_native else ""
        return cls(f"{place}-grpc", http, native)
