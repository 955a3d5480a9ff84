"""gRPC's server, which answers a call of no method of ours by itself, however that is written.

gRPC's own loop reads the name of such a method as text; where it is none, the loop ends, and all calls with it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

UNKNOWN = "unknown"
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
