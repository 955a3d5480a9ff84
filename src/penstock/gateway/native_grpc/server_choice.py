"""Choose the gRPC server of a listener: pygrpc-native if it supports the configuration, otherwise grpcio."""

from importlib.util import find_spec
from typing import NamedTuple

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.wire.tcp_connections import can_count

NATIVE, GRPCIO = "native", "grpcio"
INSTALL_COMMAND = "pip install 'penstock-serve[native]'"


class GrpcChoice(NamedTuple):
    server: str
    reason: str

    @property
    def is_native(self) -> bool:
        return self.server == NATIVE


def choose_grpc_server(config: Config, are_keys_required: bool = False, is_behind_edge: bool = False) -> GrpcChoice:
    """Choose a server; raise ConfigError if `native` is configured and not possible.

    `are_keys_required`: the endpoint requires keys. `is_behind_edge`: only the edge connects to the server, and has the
    limits that the native server lacks.
    """
    wanted = config.gateway.grpc_server
    if wanted == GRPCIO:
        return GrpcChoice(GRPCIO, "gateway.grpc_server is grpcio")
    obstacle = _find_missing_package() if is_behind_edge else _find_obstacle(config)
    if wanted == NATIVE:
        if obstacle:
            raise ConfigError(f"gateway.grpc_server is native, but {obstacle}: set it to auto or grpcio")
        return GrpcChoice(NATIVE, "gateway.grpc_server is native")
    if obstacle:
        return GrpcChoice(GRPCIO, obstacle)
    if is_behind_edge:
        return GrpcChoice(NATIVE, "it is behind the edge")
    if not config.is_local:
        # docs/decisions/0034: the native server does not bound the decompressed size of a message.
        return GrpcChoice(GRPCIO, f"other machines can reach {config.host}; the native server is for loopback only")
    if are_keys_required:
        return GrpcChoice(
            GRPCIO, "keys are required; the native server receives whole messages before it checks the key"
        )
    return GrpcChoice(NATIVE, "no TLS and no keys, and only this machine can connect")


def _find_obstacle(config: Config) -> str:
    """Return why the native server is not possible, or an empty string."""
    if config.tls.cert:
        return "the native server has no TLS (`edge: auto` puts Envoy in front of it)"
    if not can_count():
        return "this system does not count what a connection has received"
    return _find_missing_package()


def _find_missing_package() -> str:
    return "" if find_spec("pygrpc_native") is not None else f"pygrpc-native is not installed ({INSTALL_COMMAND})"
