"""Which gRPC server a door has, and why: pygrpc-native's where it can do all that is asked for, or grpcio's."""

from importlib.util import find_spec
from typing import NamedTuple

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.wire.tcp_connections import can_count

NATIVE, GRPCIO = "native", "grpcio"
INSTALL = "pip install 'penstock-serve[native]'"


class GrpcChoice(NamedTuple):
    server: str
    reason: str

    @property
    def is_native(self) -> bool:
        return self.server == NATIVE


def choose_grpc_server(config: Config, is_asking: bool = False) -> GrpcChoice:
    """`is_asking`: the door asks who comes. Raises ConfigError where `native` is asked for and cannot be had."""
    wanted = config.gateway.grpc_server
    if wanted == GRPCIO:
        return GrpcChoice(GRPCIO, "gateway.grpc_server says so")
    obstacle = _obstacle(config)
    if wanted == NATIVE:
        if obstacle:
            raise ConfigError(f"gateway.grpc_server is native, and {obstacle}: or set it to auto or grpcio")
        return GrpcChoice(NATIVE, "gateway.grpc_server says so")
    if obstacle:
        return GrpcChoice(GRPCIO, obstacle)
    if not config.is_local:
        # docs/decisions/0034: it has no bound on what it unpacks of a compressed message.
        return GrpcChoice(GRPCIO, f"other machines reach {config.host}, and the native server is for this one alone")
    if is_asking:
        return GrpcChoice(GRPCIO, "keys are asked for, and the native server takes the whole message of who has none")
    return GrpcChoice(NATIVE, "it is installed, and the door is plain, asks for no keys, and is this machine's alone")


def _obstacle(config: Config) -> str:
    """Why the native server cannot be had; empty: it can."""
    if config.tls.cert:
        return "the native server has no TLS (docs/tls.md shows Envoy in front of it)"
    if find_spec("pygrpc_native") is None:
        return f"pygrpc-native is not installed ({INSTALL})"
    if not can_count():
        return "this system does not count what a connection has received"
    return ""
