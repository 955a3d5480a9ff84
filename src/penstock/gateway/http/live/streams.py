"""Live streams: one sampler for all that watch at the same interval, and none while nobody does."""

import asyncio
import time
from collections.abc import Callable

import orjson
import structlog

from penstock.core.errors import Draining, Refused
from penstock.telemetry.live import compare
from penstock.telemetry.live_view import Standing
from penstock.telemetry.snapshot import Snapshot

log = structlog.get_logger()
now = time.monotonic
MAX_STREAMS = 32  # of one gateway
FRESH_S = 0.1  # samplers of different intervals share a look at the metrics that is no older


def _event(before: Snapshot, after: Snapshot, seconds: float, standing: Standing) -> bytes:
    return orjson.dumps(compare(before, after, seconds, time.time(), standing))


class LiveWatch:
    """A mailbox of one event: who is slow to read misses events, and none pile up."""

    def __init__(self, on_close: "Callable[[LiveWatch], None]") -> None:
        self._on_close = on_close
        self._newest = b""
        self._has_news = asyncio.Event()
        self._is_over = False

    def put(self, event: bytes) -> None:
        self._newest = event
        self._has_news.set()

    def end(self) -> None:
        self._is_over = True
        self._has_news.set()

    async def next(self) -> bytes | None:
        """The newest event that was not yet given; none when there will be no more."""
        await self._has_news.wait()
        self._has_news.clear()
        return None if self._is_over else self._newest

    def close(self) -> None:
        self._on_close(self)


class _Sampler:
    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.watches: set[LiveWatch] = set()
        self.newest = b""

    def put(self, event: bytes) -> None:
        self.newest = event
        for watch in self.watches:
            watch.put(event)

    def end(self) -> None:
        self.task.cancel()
        for watch in self.watches:
            watch.end()


class LiveStreams:
    def __init__(
        self, read: Callable[[], Snapshot], publish: Callable[[], None], standing: Callable[[], Standing]
    ) -> None:
        """`read` reads files and runs in a thread; `publish` brings this process's own metrics up to date before."""
        self._read = read
        self._publish = publish
        self._standing = standing
        self._samplers: dict[float, _Sampler] = {}
        self._looking = asyncio.Lock()
        self._looked: tuple[Snapshot, float] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return sum(len(sampler.watches) for sampler in self._samplers.values())

    def watch(self, interval_s: float) -> LiveWatch:
        """Raises where there are too many. Who gets a watch must close it."""
        if self._is_closed:
            raise Draining("the server is shutting down: watch it again after its restart")
        if len(self) >= MAX_STREAMS:
            raise Refused(f"this gateway has {MAX_STREAMS} live streams open: close one, or try later")
        sampler = self._samplers.get(interval_s)
        if sampler is None:
            task = asyncio.create_task(self._sample(interval_s), name=f"live-{interval_s:g}")
            sampler = self._samplers[interval_s] = _Sampler(task)
        watch = LiveWatch(lambda watch: self._leave(interval_s, watch))
        sampler.watches.add(watch)
        if sampler.newest:
            watch.put(sampler.newest)
        return watch

    def close(self) -> None:
        """Ends every stream: the server is about to close its doors."""
        self._is_closed = True
        for sampler in self._samplers.values():
            sampler.end()

    def _leave(self, interval_s: float, watch: LiveWatch) -> None:
        sampler = self._samplers.get(interval_s)
        if sampler is None:
            return
        sampler.watches.discard(watch)
        if not sampler.watches:
            sampler.task.cancel()
            del self._samplers[interval_s]
            if not self._samplers:
                self._looked = None

    async def _sample(self, interval_s: float) -> None:
        try:
            before, before_at = await self._look()
            due = before_at
            while True:
                due = max(due + interval_s, now())  # what was missed is not made up for
                await asyncio.sleep(due - now())
                after, after_at = await self._look()
                seconds, standing = after_at - before_at, self._standing()
                event = await asyncio.to_thread(_event, before, after, seconds, standing)
                self._samplers[interval_s].put(event)
                before, before_at = after, after_at
        except Exception:
            log.exception("live_sampler_failed", interval_s=interval_s)
            self._samplers.pop(interval_s).end()  # its clients come again

    async def _look(self) -> tuple[Snapshot, float]:
        async with self._looking:
            if self._looked is None or now() - self._looked[1] > FRESH_S:
                self._publish()
                # Reads a file for each process and kind of metric: off the event loop.
                self._looked = (await asyncio.to_thread(self._read), now())
            return self._looked
