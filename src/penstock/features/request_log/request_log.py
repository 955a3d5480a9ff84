"""The request log of a gateway: it takes a row per request, and writes rows in batches in the background."""

import asyncio
import time
from collections.abc import Callable
from uuid import uuid4

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.config import RequestLogSettings
from penstock.core.errors import Unavailable
from penstock.core.requests import InferRequest
from penstock.features.request_log.log_buffer import LogBuffer
from penstock.features.request_log.log_query import LogQuery
from penstock.features.request_log.log_row import LogRow, RequestEnd, make_log_row
from penstock.features.request_log.log_stores.log_store import LogStore
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.metrics import RequestLogMetrics

log = structlog.get_logger()
LINGER_S = 0.1  # rows within this time are written together
RETRY_S = 0.5  # pause after a failed write
EXPIRY_S = 60.0  # between two removals of old rows
CLOSE_S = 5.0  # to write the last rows at shutdown
FULL, REJECTED, SHUTDOWN, BUG = "buffer_full", "rejected", "shutdown", "bug"  # reasons of a loss


class RequestLog:
    """Logs requests without delaying them. If the store is too slow, rows are dropped and counted."""

    def __init__(
        self,
        store: LogStore,
        settings: RequestLogSettings,
        gateway: str,
        metrics: RequestLogMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._max_payload_bytes = settings.payload_bytes
        self._gateway = gateway
        self._metrics = metrics
        self._clock = clock
        self._buffer = LogBuffer(settings.buffer_bytes)
        self._has_rows = asyncio.Event()
        self._is_away = False
        self._has_bug = False
        self._is_closed = False
        self._tasks = BackgroundTasks("request-log")

    async def start(self) -> None:
        self._tasks.supervise("request-log-writer", self._write_next, deadline_s=None)
        self._tasks.supervise("request-log-tidy", self._delete_expired_rows, every=lambda: EXPIRY_S, deadline_s=None)

    async def close(self) -> None:
        """Write the waiting rows for at most CLOSE_S; drop the rest."""
        await self._tasks.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                while len(self._buffer):
                    await self._write()
        except self._store.faults as error:
            self._report_failure(error)
        self._is_closed = True
        self._count_lost(SHUTDOWN, len(self._buffer))
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._store.close()
        except self._store.faults as error:
            log.debug("request_log_close_failed", error=str(error))

    def add(
        self,
        request: InferRequest,
        block: BlockDescription | None,
        status: str,
        duration_s: float,
        response_bytes: int,
    ) -> None:
        """Log a request that has ended. Never raise, because the request is already answered."""
        try:
            if not request.request_id:
                request.request_id = uuid4().hex
            ending = RequestEnd(status, self._clock(), duration_s, response_bytes)
            row = make_log_row(request, block, ending, self._gateway, self._max_payload_bytes)
            if self._is_closed:
                self._count_lost(SHUTDOWN, 1)
            elif self._buffer.add(row):
                self._has_rows.set()
            else:
                self._count_lost(FULL, 1)
        except Exception as error:
            self._count_lost(BUG, 1)
            if not self._has_bug:
                self._has_bug = True
                log.error("request_not_logged", exc_info=error)

    async def find(self, query: LogQuery) -> list[LogRow]:
        """Return the rows that the query selects, or raise Unavailable."""
        try:
            return await self._store.find(query)
        except self._store.faults as error:
            log.warning("request_log_not_read", place=self._store.place, error=str(error) or type(error).__name__)
            raise Unavailable("the request log's store does not answer now; try again later") from error

    def publish(self) -> None:
        """Update the metric that counts the waiting rows."""
        self._metrics.waiting.set(len(self._buffer))

    async def _write_next(self) -> None:
        """Wait for rows and write a batch."""
        await self._has_rows.wait()
        if not self._buffer.has_full_batch:
            await asyncio.sleep(LINGER_S)
        try:
            await self._write()
        except self._store.faults as error:
            self._report_failure(error)
            await asyncio.sleep(RETRY_S)

    async def _write(self) -> None:
        batch = self._buffer.peek_batch()
        if batch:
            written = await self._store.write(batch)
            self._buffer.drop_batch()
            self._metrics.rows.inc(written.rows)
            self._count_lost(REJECTED, written.rejected)
        if not len(self._buffer):
            self._has_rows.clear()
        if self._is_away:
            self._is_away = False
            log.info("request_log_recovered", place=self._store.place, waiting=len(self._buffer))

    async def _delete_expired_rows(self) -> None:
        try:
            removed = await self._store.delete_expired(int(self._clock() * 1e6))
        except self._store.faults as error:
            self._report_failure(error)
            return
        if removed:
            log.info("request_log_tidied", place=self._store.place, removed=removed)

    def _count_lost(self, reason: str, count: int) -> None:
        if count:
            self._metrics.lost.labels(reason).inc(count)

    def _report_failure(self, error: Exception) -> None:
        self._metrics.failures.inc()
        if not self._is_away:
            self._is_away = True
            log.warning(
                "request_log_unavailable",
                place=self._store.place,
                error=str(error) or type(error).__name__,
                meaning="rows wait in memory up to request_log.buffer_bytes; further rows are lost and counted",
            )
