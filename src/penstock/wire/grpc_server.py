"""gRPC's server, which answers a call of no method of ours by itself, however that is written.

gRPC's own loop reads the name of such a method as text; where it is none, the loop ends, and all calls with it.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import unquote

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

UNKNOWN = "unknown"
FILES = "/proc/self/fd"
Options = Sequence[tuple[str, Any]]


def grpc_server(options: Options = ()) -> grpc.aio.Server:
    """As `grpc.aio.server`; every method must be registered (`add_registered_method_handlers`)."""
    return _Server(options)


class _Server(_server.Server):  # type: ignore[misc]
    def __init__(self, options: Options) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _AioServer(self._loop, None, (), (), tuple(options), None)


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    async def _request_call(self) -> None:
        """Awaits the next call of no registered method: here they all are answered, and none is ever given back."""
        loop = asyncio.get_running_loop()
        nothing = cygrpc._MethodResolver([], {})
        answering: set[asyncio.Task[None]] = set()
        while True:
            call = await super()._request_call()
            answer = cygrpc._handle_rpc(UNKNOWN, nothing, (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, UNKNOWN))
            answering.add(task)
            task.add_done_callback(answering.discard)


def cut_connection(peer: str) -> None:
    """Closes a client's connection, for which gRPC has no call; what it has not taken goes with it."""
    address, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    # gRPC listens for both families at once, and tells an address of the older as it is.
    _cut(lambda ours, theirs: (theirs[0].removeprefix("::ffff:"), theirs[1]) == (address.strip("[]"), int(port)))


def cut_connections(port: int) -> None:
    """Closes all that clients have opened to that port."""
    _cut(lambda ours, theirs: ours[1] == port)


def _cut(is_meant: Callable[[Any, Any], bool]) -> None:
    """By the addresses of both ends. First all are found: until the last is closed there is not much time."""
    with ExitStack() as stack:
        found = []
        for name in os.listdir(FILES) if os.path.exists(FILES) else ():
            with suppress(OSError):
                if os.readlink(f"{FILES}/{name}").startswith("socket:"):
                    each = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
                    is_tcp = each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
                    if is_tcp and is_meant(each.getsockname(), each.getpeername()):
                        found.append(each)
        for each in found:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
