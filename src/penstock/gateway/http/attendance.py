"""A request is served as long as its client is there to hear the answer."""

import asyncio

from penstock.core.requests import InferRequest, InferResponse
from penstock.gateway.http.message import ClientLeft, Receive
from penstock.serving.serve import Serving

# Most answers come sooner; a timer that is never due costs a microsecond, a watching task ten.
LOOK_AFTER_S = 0.02


async def serve_attended(serving: Serving, request: InferRequest, receive: Receive) -> InferResponse:
    """Raises ClientLeft, with the request cancelled, when the client disconnects first."""
    watch = _ClientWatch(receive)
    try:
        return await serving.serve(request)
    except asyncio.CancelledError:
        if watch.has_left:
            watch.task.uncancel()
            raise ClientLeft from None
        raise
    finally:
        watch.close()


class _ClientWatch:
    __slots__ = ("_receive", "_timer", "_watcher", "has_left", "task")

    def __init__(self, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.has_left = False
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(LOOK_AFTER_S, self._look)

    def close(self) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    def _look(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        self.task.cancel()
