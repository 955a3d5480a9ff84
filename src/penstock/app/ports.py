"""The ports of a server: reserved by its first process, shared by its gateways, and by nobody else."""

import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

from penstock.core.config import Config
from penstock.core.errors import ConfigError

BACKLOG = 2048
T = TypeVar("T")


def reserve_port(host: str, port: int, flag: str) -> socket.socket:
    """A socket that is bound and never listens keeps the port while gateways come and go; 0 takes a free one."""
    # SO_REUSEPORT would let a second server share the port in silence, so look before it is opened so.
    _bind(host, port, flag, socket.SO_REUSEADDR).close()
    # Without SO_REUSEADDR: had both sides that, a second server could bind while no gateway listens.
    return _bind(host, port, flag, socket.SO_REUSEPORT)


def reserve_ports(config: Config, stack: AsyncExitStack) -> tuple[int, int]:
    """Of the clients' doors, for as long as the stack is open: HTTP's and gRPC's."""
    http = stack.enter_context(reserve_port(config.host, config.http_port, "--http-port"))
    grpc = stack.enter_context(reserve_port(config.host, config.grpc_port, "--grpc-port"))
    return http.getsockname()[1], grpc.getsockname()[1]


def open_http_socket(host: str, port: int) -> socket.socket:
    """Shared by the gateways of one machine; a client that comes now waits to be taken."""
    opened = _bind(host, port, "--http-port", socket.SO_REUSEADDR, socket.SO_REUSEPORT)
    opened.listen(BACKLOG)
    return opened


async def open_own_socket(host: str, flag: str, port: int) -> socket.socket:
    """One that nobody shares; as `open_usual` asks for it."""
    opened = _bind(host, port, flag, socket.SO_REUSEADDR)
    opened.listen(BACKLOG)
    return opened


async def open_usual(listen: Callable[[int], Awaitable[T]], wanted: int | None, usual: int) -> T:
    """At the port that is wanted, or the usual one; that gives way to a free one where another role has it."""
    try:
        return await listen(usual if wanted is None else wanted)
    except ConfigError:
        if wanted is not None:
            raise
        return await listen(0)


def _bind(host: str, port: int, flag: str, *options: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    for option in options:
        opened.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}") from error
    return opened
