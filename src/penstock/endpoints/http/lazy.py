"""An ASGI application that is built at its first call, to keep the start of a process short."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send


class LazyApp:
    def __init__(self, build: Callable[[], ASGIApp]) -> None:
        """Wrap `build`, which runs in a thread because its imports may take long."""
        self._build = build
        self._building: asyncio.Task[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = await self.app()
        await app(scope, receive, send)

    async def app(self) -> ASGIApp:
        if self._building is None:
            self._building = asyncio.create_task(asyncio.to_thread(self._build), name="build-app")
        return await asyncio.shield(self._building)
