"""The response cache: answers repeated requests from a store, and runs identical requests in flight only once."""

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
from penstock.features.cache.cache_key import CacheKeys, make_key_prefix
from penstock.features.cache.cached_answer import CachedAnswer, decode, encode
from penstock.features.cache.flights import FlightPart, Flights
from penstock.features.cache.stores.cache_store import CacheStore
from penstock.features.cache.stores.lru import StoreCounts
from penstock.telemetry.metrics import CacheMetrics
from penstock.telemetry.tally import Tallies

log = structlog.get_logger()
now = time.monotonic
Run = Callable[[BlockDescription, InferRequest, float], Awaitable[InferResponse]]
OUTCOMES = ("hit", "miss", "shared", "bypass", "refresh")
MIN_ENTRIES = 16  # an answer is stored only if the cache has room for this many of its size
RECENT = 256  # decoded entries kept in memory, possibly for a while after their eviction
MAX_INLINE_DIGEST = 1024 * 1024  # bytes; the digest of a larger request is computed in a thread


class ResponseCache:
    """Answers requests from the cache, or runs them and stores their answers."""

    def __init__(
        self,
        store: CacheStore,
        settings: CacheSettings,
        metrics: CacheMetrics,
        is_current: Callable[[BlockDescription], bool] = lambda block: True,
    ) -> None:
        """Create a cache. `is_current` returns whether a block's description still matches its files."""
        self._is_current = is_current
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._largest = settings.max_bytes // MIN_ENTRIES
        self._flights: Flights[CachedAnswer] = Flights()
        self._blocks: dict[str, _BlockCache] = {}
        self._counts: dict[str, _BlockCounts] = {}
        self._tallies = Tallies()
        self._published = StoreCounts()
        self._unreadable = 0
        self._clearings = 0
        # By key: an entry's bytes and its decoded answer. If the entry was replaced, its bytes are a different object.
        self._recent: dict[bytes, tuple[bytes, CachedAnswer]] = {}

    async def start(self) -> None:
        await self._store.start()

    async def close(self) -> None:
        await self._flights.close()
        await self._store.close()

    async def run(self, block: BlockDescription, request: InferRequest, deadline: float, run: Run) -> InferResponse:
        """Return the cached answer to the request, or run the request with `run`, which takes a deadline."""
        known = self._find_block_cache(block)
        mode = request.controls.cache
        if not known.is_cacheable or request.controls.session is not None:
            return await run(block, request, deadline)
        if known.generates and not _is_repeatable(request):
            return await run(block, request, deadline)
        if mode == "bypass":
            known.counts.add("bypass")
            return await run(block, request, deadline)
        if request.size_bytes <= MAX_INLINE_DIGEST:
            key = known.keys.compute_key(request)
        else:
            key = await asyncio.to_thread(known.keys.compute_key, request)
        if mode == "refresh":
            answer = _to_cached_answer(await run(block, request, deadline))
            known.counts.add("refresh")
            await self._store_answer(known, key, answer)
            return answer.to_response(request, block.version)
        return self._find_hit(known, key, request) or await self._share_run(known, key, request, deadline, run)

    def _find_hit(self, known: "_BlockCache", key: bytes, request: InferRequest) -> InferResponse | None:
        kept = self._store.get_now(key)
        if kept is None:
            return None
        before, answer = self._recent.get(key, (None, None))
        if before is not kept:
            answer = self._decode_entry(kept)
            if answer is not None:
                if len(self._recent) >= RECENT:
                    self._recent.clear()
                self._recent[key] = kept, answer
        if answer is None:
            return None
        known.counts.add_hit(answer)
        return answer.to_hit_response(request, known.block.version)

    async def delete(self, block_id: str | None = None) -> int:
        """Delete the answers of a block, or all answers; return their number. Requests in flight store no answers."""
        self._clearings += 1
        self._recent.clear()
        return await self._store.clear(b"" if block_id is None else make_key_prefix(block_id))

    def statistics(self) -> dict[str, Any]:
        """Return the state of this gateway's cache and its counts since the start."""
        store = self._store.get_counts()
        blocks = {block_id: counts.as_dict() for block_id, counts in self._counts.items()}
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
        self._tallies.flush()
        counts, before = self._store.get_counts(), self._published
        counts.errors += self._unreadable
        self._metrics.bytes.set(counts.size_bytes)
        self._metrics.entries.set(counts.entries)
        self._metrics.evictions.labels("size").inc(counts.evicted_by_size - before.evicted_by_size)
        self._metrics.evictions.labels("ttl").inc(counts.evicted_by_ttl - before.evicted_by_ttl)
        self._metrics.errors.inc(counts.errors + counts.dropped - before.errors - before.dropped)
        self._published = counts

    async def _share_run(
        self, known: "_BlockCache", key: bytes, request: InferRequest, deadline: float, run: Run
    ) -> InferResponse:
        clearings = self._clearings

        async def find_or_run(until: float) -> CachedAnswer:
            return await self._find_answer(key, until) or _to_cached_answer(await run(known.block, request, until))

        async def keep(answer: CachedAnswer) -> None:
            if not answer.is_stored and self._clearings == clearings:
                await self._store_answer(known, key, answer)

        answer, part = await self._flights.share(key, deadline, find_or_run, keep)
        version = known.block.version
        if answer.is_stored or part is FlightPart.JOINED_AFTER_END:
            known.counts.add_hit(answer)
            return answer.to_hit_response(request, version)
        known.counts.add("miss" if part is FlightPart.LED else "shared")
        return answer.to_response(request, version)

    async def _find_answer(self, key: bytes, deadline: float) -> CachedAnswer | None:
        try:
            async with asyncio.timeout(deadline - now()):
                kept = await self._store.get(key)
        except TimeoutError:
            return None  # the run then fails at the deadline, with a better error
        return None if kept is None else self._decode_entry(kept)

    async def _store_answer(self, known: "_BlockCache", key: bytes, answer: CachedAnswer) -> None:
        if answer.size_bytes() > self._largest or not self._is_current(known.block):
            return
        kept = encode(answer)
        if len(kept) <= self._largest:
            await self._store.set(key, kept, known.ttl_s)

    def _decode_entry(self, kept: bytes) -> CachedAnswer | None:
        try:
            return decode(kept)
        except WireError as error:
            self._unreadable += 1
            log.warning("cache_entry_unreadable", store=self._store.name, error=error.message)
            return None

    def _find_block_cache(self, block: BlockDescription) -> "_BlockCache":
        known = self._blocks.get(block.block_id)
        if known is None or known.block is not block:
            counts = self._counts.get(block.block_id)
            if counts is None:
                counts = self._counts[block.block_id] = _BlockCounts(self._metrics, block, self._tallies)
            known = self._blocks[block.block_id] = _BlockCache(block, self._settings.ttl_s, counts)
        return known


class _BlockCache:
    """The settings of the cache for the requests of one block."""

    def __init__(self, block: BlockDescription, ttl_s: float, counts: "_BlockCounts") -> None:
        settings = block.settings
        self.block = block
        self.counts = counts
        self.keys = CacheKeys(block)
        self.ttl_s = ttl_s if settings.cache.ttl_s is None else settings.cache.ttl_s
        # Without a fingerprint, answers of different files could not be distinguished.
        self.is_cacheable = (
            settings.cache.enabled
            and bool(block.fingerprint)
            and not settings.is_decoupled
            and not settings.sessions.is_stateful
        )
        self.generates = settings.task == GENERATE


class _BlockCounts:
    """Counts one block's requests by outcome, for `statistics` and for the metrics."""

    def __init__(self, metrics: CacheMetrics, block: BlockDescription, tallies: Tallies) -> None:
        labels = (block.model, block.version)
        self._labels = labels
        self.by_outcome = dict.fromkeys(OUTCOMES, 0)
        self.saved_s = 0.0
        self._outcomes = {
            outcome: tallies.add_counter(metrics.requests.labels(*labels, outcome)) for outcome in OUTCOMES
        }
        self._saved = tallies.add_counter(metrics.saved_seconds.labels(*labels))

    def add(self, outcome: str) -> None:
        self.by_outcome[outcome] += 1
        self._outcomes[outcome].inc()

    def add_hit(self, answer: CachedAnswer) -> None:
        self.add("hit")
        saved_s = answer.timing.compute_ns / 1e9
        self.saved_s += saved_s
        self._saved.inc(saved_s)

    def as_dict(self) -> dict[str, Any]:
        model, version = self._labels
        return {"model": model, "version": version, **self.by_outcome, "saved_seconds": self.saved_s}


def _is_repeatable(request: InferRequest) -> bool:
    """Return whether a repeat would generate the same text, because the request sets a seed or temperature 0."""
    if "seed" in request.parameters:
        return True
    try:
        return float(request.parameters.get("temperature", 1)) == 0
    except ValueError:
        return False


def _to_cached_answer(response: InferResponse) -> CachedAnswer:
    return CachedAnswer(response.outputs, response.parameters, response.timing, False)
