"""The response cache: gives answers again, and lets identical requests in flight share one run."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.config import CacheSettings
from penstock.core.errors import WireError
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.settings import GENERATE
from penstock.serving.cache.entry import CachedAnswer, decode, encode
from penstock.serving.cache.flights import FlightPart, Flights
from penstock.serving.cache.key import KeyMaker, key_prefix
from penstock.storage.cache.lru import StoreCounts
from penstock.storage.cache.store import CacheStore
from penstock.telemetry.metrics import CacheMetrics
from penstock.telemetry.tally import Tallies

log = structlog.get_logger()
now = time.monotonic
Run = Callable[[BlockDescription, InferRequest, float], Awaitable[InferResponse]]
OUTCOMES = ("hit", "miss", "shared", "bypass", "refresh")
LARGEST_SHARE = 16  # an answer larger than this part of the cache would push out too many others
RECENT = 256  # entries whose bytes need not be read again; they may outlive the store's bound for a while
DIGESTED_AT_ONCE = 1024 * 1024  # bytes: more are digested in a thread, so that nobody waits for it


class ResponseCache:
    def __init__(
        self,
        store: CacheStore,
        settings: CacheSettings,
        metrics: CacheMetrics,
        is_current: Callable[[BlockDescription], bool] = lambda block: True,
    ) -> None:
        """`is_current` says whether a block is still as described: else its answers may be of other files."""
        self._is_current = is_current
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._largest = settings.max_bytes // LARGEST_SHARE
        self._flights: Flights[CachedAnswer] = Flights()
        self._blocks: dict[str, _BlockCache] = {}
        self._counts: dict[str, _BlockCounts] = {}
        self._tallies = Tallies()
        self._published = StoreCounts()
        self._unreadable = 0
        self._clearings = 0
        # What was read of entries that are asked for again and again; an entry that was replaced is another object.
        self._recent: dict[bytes, tuple[bytes, CachedAnswer]] = {}

    async def start(self) -> None:
        await self._store.start()

    async def close(self) -> None:
        await self._flights.close()
        await self._store.close()

    async def through(self, block: BlockDescription, request: InferRequest, deadline: float, run: Run) -> InferResponse:
        """The kept answer, or that of `run`, which executes the request by the deadline that it is given."""
        known = self._of(block)
        mode = request.controls.cache
        if not known.may_keep or request.controls.session is not None:
            return await run(block, request, deadline)
        if known.generates and not _is_repeatable(request):
            return await run(block, request, deadline)
        if mode == "bypass":
            known.counts.add("bypass")
            return await run(block, request, deadline)
        if request.size_bytes <= DIGESTED_AT_ONCE:
            key = known.keys.key(request)
        else:
            key = await asyncio.to_thread(known.keys.key, request)
        if mode == "refresh":
            answer = _answer(await run(block, request, deadline))
            known.counts.add("refresh")
            await self._keep(known, key, answer)
            return answer.to(request, block.version)
        return self._hit(known, key, request) or await self._ask(known, key, request, deadline, run)

    def _hit(self, known: "_BlockCache", key: bytes, request: InferRequest) -> InferResponse | None:
        kept = self._store.get_now(key)
        if kept is None:
            return None
        before, answer = self._recent.get(key, (None, None))
        if before is not kept:
            answer = self._read(kept)
            if answer is not None:
                if len(self._recent) >= RECENT:
                    self._recent.clear()
                self._recent[key] = kept, answer
        if answer is None:
            return None
        known.counts.add_hit(answer)
        return answer.as_hit(request, known.block.version)

    async def delete(self, block_id: str | None = None) -> int:
        """Forgets a block's answers, or all of them, and those that are being made now. Returns how many."""
        self._clearings += 1
        self._recent.clear()
        return await self._store.clear(b"" if block_id is None else key_prefix(block_id))

    def statistics(self) -> dict[str, Any]:
        """What this gateway's cache has done since it started."""
        store = self._store.counts()
        blocks = {block_id: counts.described() for block_id, counts in self._counts.items()}
        return {
            "store": self._store.name,
            "entries": store.entries,
            "bytes": store.size_bytes,
            "max_bytes": self._settings.max_bytes,
            "in_flight": len(self._flights),
            "evictions": {"size": store.evicted_by_size, "ttl": store.evicted_by_ttl},
            "errors": store.errors + self._unreadable,
            "dropped_writes": store.dropped,
            "saved_seconds": sum(counts.saved_s for counts in self._counts.values()),
            **{outcome: sum(counts.by_outcome[outcome] for counts in self._counts.values()) for outcome in OUTCOMES},
            "blocks": blocks,
        }

    def publish(self) -> None:
        """Brings the shared metrics up to date."""
        self._tallies.flush()
        counts, before = self._store.counts(), self._published
        counts.errors += self._unreadable
        self._metrics.bytes.set(counts.size_bytes)
        self._metrics.entries.set(counts.entries)
        self._metrics.evictions.labels("size").inc(counts.evicted_by_size - before.evicted_by_size)
        self._metrics.evictions.labels("ttl").inc(counts.evicted_by_ttl - before.evicted_by_ttl)
        self._metrics.errors.inc(counts.errors + counts.dropped - before.errors - before.dropped)
        self._published = counts

    async def _ask(
        self, known: "_BlockCache", key: bytes, request: InferRequest, deadline: float, run: Run
    ) -> InferResponse:
        clearings = self._clearings

        async def find_or_run(until: float) -> CachedAnswer:
            return await self._find(key, until) or _answer(await run(known.block, request, until))

        async def keep(answer: CachedAnswer) -> None:
            if not answer.is_kept and self._clearings == clearings:
                await self._keep(known, key, answer)

        answer, part = await self._flights.share(key, deadline, find_or_run, keep)
        version = known.block.version
        if answer.is_kept or part is FlightPart.CAME_LATE:
            known.counts.add_hit(answer)
            return answer.as_hit(request, version)
        known.counts.add("miss" if part is FlightPart.LED else "shared")
        return answer.to(request, version)

    async def _find(self, key: bytes, deadline: float) -> CachedAnswer | None:
        try:
            async with asyncio.timeout(deadline - now()):
                kept = await self._store.get(key)
        except TimeoutError:
            return None  # the run says it better
        return None if kept is None else self._read(kept)

    async def _keep(self, known: "_BlockCache", key: bytes, answer: CachedAnswer) -> None:
        if answer.size_bytes() > self._largest or not self._is_current(known.block):
            return
        kept = encode(answer)
        if len(kept) <= self._largest:
            await self._store.set(key, kept, known.ttl_s)

    def _read(self, kept: bytes) -> CachedAnswer | None:
        try:
            return decode(kept)
        except WireError as error:
            self._unreadable += 1
            log.warning("cache_entry_unreadable", store=self._store.name, error=error.message)
            return None

    def _of(self, block: BlockDescription) -> "_BlockCache":
        known = self._blocks.get(block.block_id)
        if known is None or known.block is not block:
            counts = self._counts.get(block.block_id)
            if counts is None:
                counts = self._counts[block.block_id] = _BlockCounts(self._metrics, block, self._tallies)
            known = self._blocks[block.block_id] = _BlockCache(block, self._settings.ttl_s, counts)
        return known


class _BlockCache:
    """What the cache does with the requests of one block, found out once."""

    def __init__(self, block: BlockDescription, ttl_s: float, counts: "_BlockCounts") -> None:
        settings = block.settings
        self.block = block
        self.counts = counts
        self.keys = KeyMaker(block)
        self.ttl_s = ttl_s if settings.cache.ttl_s is None else settings.cache.ttl_s
        # Without a fingerprint nobody could tell its answers from those of other files.
        self.may_keep = (
            settings.cache.enabled
            and bool(block.fingerprint)
            and not settings.is_decoupled
            and not settings.sessions.is_stateful
        )
        self.generates = settings.task == GENERATE


class _BlockCounts:
    """One block's counts: here since the start, and for the shared metrics."""

    def __init__(self, metrics: CacheMetrics, block: BlockDescription, tallies: Tallies) -> None:
        labels = (block.model, block.version)
        self._labels = labels
        self.by_outcome = dict.fromkeys(OUTCOMES, 0)
        self.saved_s = 0.0
        self._outcomes = {outcome: tallies.counter(metrics.requests.labels(*labels, outcome)) for outcome in OUTCOMES}
        self._saved = tallies.counter(metrics.saved_seconds.labels(*labels))

    def add(self, outcome: str) -> None:
        self.by_outcome[outcome] += 1
        self._outcomes[outcome].inc()

    def add_hit(self, answer: CachedAnswer) -> None:
        self.add("hit")
        saved_s = answer.timing.compute_ns / 1e9
        self.saved_s += saved_s
        self._saved.inc(saved_s)

    def described(self) -> dict[str, Any]:
        model, version = self._labels
        return {"model": model, "version": version, **self.by_outcome, "saved_seconds": self.saved_s}


def _is_repeatable(request: InferRequest) -> bool:
    """Whether generated text would be the same again: its request says that no chance is in it, or which."""
    if "seed" in request.parameters:
        return True
    try:
        return float(request.parameters.get("temperature", 1)) == 0
    except ValueError:
        return False


def _answer(response: InferResponse) -> CachedAnswer:
    return CachedAnswer(response.outputs, response.parameters, response.timing, False)
