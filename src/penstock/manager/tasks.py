"""Tasks that end with whoever began them; what fails in one is logged, and told."""

import asyncio
from collections.abc import Callable, Coroutine

import structlog

log = structlog.get_logger()


class Tasks:
    def __init__(self, owner: str, on_failure: Callable[[BaseException], None] = lambda error: None) -> None:
        self._owner = owner
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(f"{self._owner}_task_failed", error=repr(error))
            self._on_failure(error)
