"""A gRPC server that survives calls of unknown methods, and limits the memory for headers.

grpc.aio decodes the name of an unknown method as text. If the decoding fails, grpc.aio's accept loop ends, and no
further call is answered. Only this file uses private parts of grpc.aio's server; test_grpc_server.py fails if a new
version changes these parts.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

from penstock.wire.grpc_listener.header_memory import ArrivedMessages
from penstock.wire.grpc_listener.header_memory_guard import HeaderMemoryGuard

UNKNOWN = "unknown"
GRPC_LOGGER = "grpc._cython.cygrpc"  # the name of the logger of grpc.aio's server
UNIX = "unix:"
Options = Sequence[tuple[str, Any]]


def grpc_server(options: Options = (), arrived: ArrivedMessages | None = None) -> grpc.aio.Server:
    """Return a server like `grpc.aio.server`. Its methods must be registered (`add_registered_method_handlers`).

    `arrived` counts the bytes of messages, so that clients with large messages are not mistaken for attackers.
    """
    return _Server(options, arrived or ArrivedMessages())


class _Server(_server.Server):  # type: ignore[misc]
    def __init__(self, options: Options, arrived: ArrivedMessages) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _AioServer(self._loop, None, (), (), tuple(options), None)
        self._headers = HeaderMemoryGuard(arrived)

    def add_insecure_port(self, address: str) -> int:
        return self._watch_headers(address, super().add_insecure_port(address))

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        return self._watch_headers(address, super().add_secure_port(address, server_credentials))

    def _watch_headers(self, address: str, port: int) -> int:
        if not address.startswith(UNIX):
            self._headers.watch(port)
        return port

    async def start(self) -> None:
        await super().start()
        self._headers.start()

    async def stop(self, grace: float | None) -> None:
        await super().stop(grace)
        await self._headers.close()


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    async def _request_call(self) -> None:
        """Answer calls of unregistered methods with UNIMPLEMENTED. Never return a call to grpc.aio's accept loop."""
        loop = asyncio.get_running_loop()
        nothing = cygrpc._MethodResolver([], {})
        answering: set[asyncio.Task[None]] = set()
        while True:
            call = await super()._request_call()
            answer = cygrpc._handle_rpc(UNKNOWN, nothing, (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, UNKNOWN))
            answering.add(task)
            task.add_done_callback(answering.discard)
