"""The asynchronous requests of one gateway: starts them, stores their answers, and cancels them for any gateway."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

import orjson
import structlog

from penstock.core.config import AsyncSettings
from penstock.core.errors import (
    BUG_MESSAGE,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    NotFound,
    Overloaded,
    PenstockError,
    Unavailable,
)
from penstock.core.principals import Principal
from penstock.endpoints import statuses
from penstock.features.async_requests.async_records import (
    LEASE_S,
    AsyncRecord,
    AsyncState,
    StoredAnswer,
    make_finished_record,
)
from penstock.features.async_requests.async_store import AsyncStore
from penstock.telemetry.background import BackgroundTasks

log = structlog.get_logger()
EXPIRE_EVERY_S = 60.0
CLOSE_S = 5.0
RETRY_S = 0.5  # between two attempts to store an answer while the store is unavailable
Run = Callable[[], Awaitable[StoredAnswer]]


class AsyncRequests:
    def __init__(self, settings: AsyncSettings, store: AsyncStore) -> None:
        self.settings = settings
        self._store = store
        self._tasks = BackgroundTasks("async_requests")
        self._running: dict[str, asyncio.Task[None]] = {}
        self._finishing: set[str] = set()  # requests whose answers still have to be stored
        self._is_away = False
        self._away_at = 0.0  # time at which the store last failed to answer
        self._is_closing = False
        self._expired_at = 0.0

    async def start(self, principal: Principal, path: str, run: Run) -> AsyncRecord:
        """Store a record, and call `run` for the answer in the background. Raise Overloaded if there is no room."""
        if self._is_closing:
            raise Draining("this server is shutting down; send the request to another server")
        if (count := len(self._running) + len(self._finishing)) >= self.settings.max_running:
            raise Overloaded(f"{count} asynchronous requests are running (async_requests.max_running); try again later")
        now = time.time()
        record = AsyncRecord(
            request_id=uuid4().hex,
            owner=principal.key_id,
            path=path,
            state=AsyncState.RUNNING,
            created_at=now,
            # A running request does not expire while its gateway renews it.
            expires_at=now + self.settings.max_run_s + self.settings.ttl_s,
            alive_until=now + LEASE_S,
        )
        await self._store.add(record, now)
        self._running[record.request_id] = self._tasks.spawn(self._run(record, run))
        await asyncio.sleep(0)  # a task that is cancelled before its first step would not store its end
        return record

    async def find(self, request_id: str, principal: Principal) -> AsyncRecord:
        """Return the record; raise NotFound unless the request belongs to the caller's key."""
        now = time.time()
        try:
            record = await self._store.get(request_id, now)
        except Unavailable:
            self._away_at = now
            raise
        if record is None or record.owner != principal.key_id:
            raise NotFound(f"there is no asynchronous request '{request_id[:80]}': it has expired, or never existed")
        # While a store is unavailable, no gateway can renew the leases of its requests.
        return record if now < self._away_at + LEASE_S else record.seen_at(now)

    async def get_answer(self, record: AsyncRecord) -> StoredAnswer:
        found = await self._store.get_answer(record.request_id)
        if found is None:
            raise NotFound(f"the asynchronous request '{record.request_id}' no longer has a result")
        return found

    async def cancel(self, record: AsyncRecord) -> None:
        """Cancel a running request, whichever gateway runs it, or delete the result of a request that has ended."""
        if record.state is not AsyncState.RUNNING:
            await self._store.remove(record.request_id)
        elif (task := self._running.get(record.request_id)) is not None:
            task.cancel()
        else:
            await self._store.ask_cancel(record.request_id)

    async def tick(self) -> None:
        """Renew the leases of the running requests, and cancel requests whose cancellation another gateway received."""
        try:
            await self._renew_leases(time.time())
        except Unavailable as error:
            if not self._is_away:
                log.warning("async_requests_store_away", error=error.message, meaning="answers wait in memory")
            self._is_away, self._away_at = True, time.time()
        else:
            self._is_away = False

    async def _renew_leases(self, now: float) -> None:
        if alive := [*self._running, *self._finishing]:
            for request_id in await self._store.renew(alive, now + LEASE_S):
                if (task := self._running.get(request_id)) is not None:
                    task.cancel()
        if now - self._expired_at > EXPIRE_EVERY_S:
            self._expired_at = now
            await self._store.expire(now)

    async def close(self) -> None:
        """End the running requests with an error that says that the server is shutting down."""
        self._is_closing = True
        await self._tasks.close(CLOSE_S)
        await self._store.close()

    async def _run(self, record: AsyncRecord, run: Run) -> None:
        try:
            async with asyncio.timeout(self.settings.max_run_s):
                answer = await run()
            state = AsyncState.SUCCEEDED if answer.status < 400 else AsyncState.FAILED
        except asyncio.CancelledError:
            if self._is_closing:
                state, answer = AsyncState.FAILED, make_error_answer(Draining("the server shut down before the answer"))
            else:
                state, answer = AsyncState.CANCELLED, make_error_answer(Cancelled("the request was cancelled"))
        except PenstockError as error:
            state, answer = AsyncState.FAILED, make_error_answer(error)
        except TimeoutError:
            late = DeadlineExceeded(f"no answer within {self.settings.max_run_s:g} s")
            state, answer = AsyncState.FAILED, make_error_answer(late)
        except Exception:
            log.exception("bug", where="async_requests", path=record.path)
            state, answer = AsyncState.FAILED, make_error_answer(InternalError(BUG_MESSAGE))
        del self._running[record.request_id]
        try:
            await self._finish(record, state, answer)
        finally:
            self._finishing.discard(record.request_id)

    async def _finish(self, record: AsyncRecord, state: AsyncState, answer: StoredAnswer) -> None:
        if len(answer.body) > self.settings.max_result_bytes:
            state = AsyncState.FAILED
            answer = make_error_answer(
                Overloaded(
                    f"the answer has {len(answer.body)} bytes, more than the {self.settings.max_result_bytes} of an "
                    f"asynchronous one: send the request without asking for an asynchronous answer"
                )
            )
        while True:
            try:
                await self._store.finish(
                    make_finished_record(record, state, answer, time.time(), self.settings.ttl_s), answer
                )
                return
            except Overloaded as error:
                state, answer = AsyncState.FAILED, make_error_answer(error)
            except Unavailable:
                # Retry until the store answers or the gateway closes. `max_running` bounds the waiting answers.
                self._finishing.add(record.request_id)
                await asyncio.sleep(RETRY_S)


def make_error_answer(error: PenstockError) -> StoredAnswer:
    body = orjson.dumps({"error": {"code": error.code, "message": statuses.make_public_message(error)}})
    return StoredAnswer(statuses.get_http_code(error), "application/json", body)
