"""The ports of a server.

The server's first process reserves the ports, so that no other server takes them; only its gateways listen on them.
"""

import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

from penstock.core.config import Config
from penstock.core.errors import ConfigError

BACKLOG = 2048
SOCKET_MODE = 0o666  # the permissions of its folder decide who may connect
T = TypeVar("T")


def reserve_port(host: str, port: int, flag: str) -> socket.socket:
    """Return a bound socket that never listens, but reserves the port across gateway restarts. 0 means a free port."""
    # With SO_REUSEPORT a second server could share the port unnoticed, so check first without it.
    _bind(host, port, flag, socket.SO_REUSEADDR).close()
    # Without SO_REUSEADDR, because a second server could otherwise bind while no gateway listens.
    return _bind(host, port, flag, socket.SO_REUSEPORT)


def reserve_ports(config: Config, stack: AsyncExitStack) -> tuple[int, int]:
    """Reserve the clients' HTTP and gRPC ports until the stack closes."""
    http = stack.enter_context(reserve_port(config.host, config.http_port, "--http-port"))
    grpc = stack.enter_context(reserve_port(config.host, config.grpc_port, "--grpc-port"))
    if config.edge_http3:  # checked and not reserved: a socket that nobody reads would receive clients' packets
        _bind(config.host, http.getsockname()[1], "--http-port", kind=socket.SOCK_DGRAM).close()
    return http.getsockname()[1], grpc.getsockname()[1]


def open_http_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket that gateways of this machine can share; clients that connect now wait in its backlog."""
    opened = _bind(host, port, "--http-port", socket.SO_REUSEADDR, socket.SO_REUSEPORT)
    opened.listen(BACKLOG)
    return opened


def open_unix_socket(path: str) -> socket.socket:
    """Open a listening unix socket. Replace the file that a killed process may have left."""
    Path(path).unlink(missing_ok=True)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened.bind(path)
    Path(path).chmod(SOCKET_MODE)
    opened.listen(BACKLOG)
    return opened


async def open_unshared_socket(host: str, flag: str, port: int) -> socket.socket:
    """Open a listening socket that is not shared."""
    opened = _bind(host, port, flag, socket.SO_REUSEADDR)
    opened.listen(BACKLOG)
    return opened


async def open_default_port(listen: Callable[[int], Awaitable[T]], requested_port: int | None, default_port: int) -> T:
    """Listen at `requested_port`; if it is None, at `default_port`, or at a free port if that port is in use."""
    try:
        return await listen(default_port if requested_port is None else requested_port)
    except ConfigError:
        if requested_port is not None:
            raise
        return await listen(0)


def _bind(
    host: str, port: int, flag: str, *options: int, kind: socket.SocketKind = socket.SOCK_STREAM
) -> socket.socket:
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
    for option in options:
        opened.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        over = " over UDP" if kind is socket.SOCK_DGRAM else ""
        raise ConfigError(f"cannot listen on {host}:{port}{over}: {error.strerror}; choose another {flag}") from error
    return opened
