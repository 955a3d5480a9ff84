"""Live streams. All watchers with the same interval share one sampler; without watchers, no sampler runs."""

import asyncio
import time
from collections.abc import Callable

import orjson
import structlog

from penstock.core.errors import Draining, Refused
from penstock.features.live.figures import compare
from penstock.features.live.live_view import ServerInfo
from penstock.telemetry.snapshot import Snapshot

log = structlog.get_logger()
now = time.monotonic
MAX_STREAMS = 32  # per gateway
FRESH_S = 0.1  # samplers with different intervals share a snapshot of the metrics up to this age


def _encode_event(before: Snapshot, after: Snapshot, seconds: float, state: ServerInfo) -> bytes:
    return orjson.dumps(compare(before, after, seconds, time.time(), state))


class LiveWatch:
    """A watcher's mailbox with room for one event, so that a slow reader misses events instead of collecting them."""

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
        """Wait for a new event, and return the newest event, or None if the stream has ended."""
        await self._has_news.wait()
        self._has_news.clear()
        return None if self._is_over else self._newest

    def close(self) -> None:
        self._on_close(self)


class _Sampler:
    """Makes one event per interval, in a task, and passes each event to the watchers of that interval."""

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
    """Runs the live streams of a gateway."""

    def __init__(
        self, read: Callable[[], Snapshot], publish: Callable[[], None], state: Callable[[], ServerInfo]
    ) -> None:
        """Create the streams. `publish` updates this process's metrics before `read` reads those of all processes."""
        self._read = read
        self._publish = publish
        self._state = state
        self._samplers: dict[float, _Sampler] = {}
        self._reading = asyncio.Lock()
        self._last: tuple[Snapshot, float] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return sum(len(sampler.watches) for sampler in self._samplers.values())

    def watch(self, interval_s: float) -> LiveWatch:
        """Start a watch, which the caller must close; raise Refused if there are too many."""
        if self._is_closed:
            raise Draining("the server is shutting down: reconnect after its restart")
        if len(self) >= MAX_STREAMS:
            raise Refused(f"this gateway has {MAX_STREAMS} live streams open: close one, or try later")
        sampler = self._samplers.get(interval_s)
        if sampler is None:
            task = asyncio.create_task(self._sample_forever(interval_s), name=f"live-{interval_s:g}")
            sampler = self._samplers[interval_s] = _Sampler(task)
        watch = LiveWatch(lambda watch: self._remove(interval_s, watch))
        sampler.watches.add(watch)
        if sampler.newest:
            watch.put(sampler.newest)
        return watch

    def close(self) -> None:
        """End every stream, because the server is stopping."""
        self._is_closed = True
        for sampler in self._samplers.values():
            sampler.end()

    def _remove(self, interval_s: float, watch: LiveWatch) -> None:
        sampler = self._samplers.get(interval_s)
        if sampler is None:
            return
        sampler.watches.discard(watch)
        if not sampler.watches:
            sampler.task.cancel()
            del self._samplers[interval_s]
            if not self._samplers:
                self._last = None

    async def _sample_forever(self, interval_s: float) -> None:
        try:
            before, before_at = await self._take_snapshot()
            due = before_at
            while True:
                due = max(due + interval_s, now())  # missed samples are skipped
                await asyncio.sleep(due - now())
                after, after_at = await self._take_snapshot()
                seconds, state = after_at - before_at, self._state()
                event = await asyncio.to_thread(_encode_event, before, after, seconds, state)
                self._samplers[interval_s].put(event)
                before, before_at = after, after_at
        except Exception:
            log.exception("live_sampler_failed", interval_s=interval_s)
            self._samplers.pop(interval_s).end()  # its clients reconnect

    async def _take_snapshot(self) -> tuple[Snapshot, float]:
        async with self._reading:
            if self._last is None or now() - self._last[1] > FRESH_S:
                self._publish()
                # In a thread, because it reads a file for each process and kind of metric.
                self._last = (await asyncio.to_thread(self._read), now())
            return self._last
