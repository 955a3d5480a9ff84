"""A request is served as long as its client is there to hear the answer."""

import asyncio
from types import TracebackType

from penstock.core.requests import InferRequest, InferResponse
from penstock.gateway.http.message import ClientLeft, Receive
from penstock.serving.serve import Serving

# Most answers come sooner; a timer that is never due costs a microsecond, a watching task ten.
LOOK_AFTER_S = 0.02


async def serve_attended(serving: Serving, request: InferRequest, receive: Receive) -> InferResponse:
    """Raises ClientLeft, with the request cancelled, when the client disconnects first."""
    with Attendance(receive):
        return await serving.serve(request)


class Attendance:
    """Inside, this task is cancelled when the client disconnects, and raises ClientLeft."""

    __slots__ = ("_has_left", "_receive", "_task", "_timer", "_watcher")

    def __init__(self, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._has_left = False
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_AFTER_S, self._look)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._has_left and kind is asyncio.CancelledError:
            self._task.uncancel()
            raise ClientLeft from None

    def _look(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._task.cancel()
