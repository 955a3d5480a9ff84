"""One client's stream of requests: read while there is room, served at once, answered in order or as they come."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.errors import BUG, Cancelled, InternalError, PenstockError
from penstock.core.principals import Principal
from penstock.core.requests import InferRequest, InferResponse
from penstock.gateway.streams.buffer import StreamBuffer, StreamSlot
from penstock.serving.serve import Serving

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)

log = structlog.get_logger()
# Smaller answers are not counted: a stream has no more than its window of them.
COUNTED_BYTES = 16 * 1024
EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"


class Exchange(Protocol[A_co]):
    """One message of a stream, as its edge has read it, and how it is answered."""

    @property
    def request(self) -> InferRequest | PenstockError:
        """An error, where the message could not be read."""

    @property
    def size_bytes(self) -> int: ...

    async def encode(self, response: InferResponse, is_decoupled: bool) -> tuple[A_co, int]:
        """The answer and its size; raises where the protocol cannot carry it."""

    def refuse(self, error: PenstockError) -> tuple[A_co, int]: ...


class RequestStream(Generic[A]):
    def __init__(
        self,
        serving: Serving,
        is_ordered: bool,
        where: str,
        admit: Callable[[], Principal],
        is_single: bool = False,
    ) -> None:
        """`where` names the edge in the log; `admit` raises where the client is admitted no more; `is_single`: the
        client wants one answer to each request wherever the model can give one."""
        self._serving = serving
        self._is_single = is_single
        self._admit = admit
        self._where = where
        self._admission = serving.admission
        self._watch: _StallWatch | None = None
        self._buffer: StreamBuffer[A] = StreamBuffer(is_ordered)
        self._room = asyncio.Event()
        self._idle: asyncio.Future[None] | None = None  # the writer, while there is nothing to send
        self._unsent: dict[StreamSlot[A], asyncio.Future[None]] = {}  # answers whose requests go on when they are sent
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, exchanges: AsyncIterator[Exchange[A]], send: Callable[[A], Awaitable[None]]) -> None:
        """Until the client has said all and heard all. What is inside when it fails or is cancelled is cancelled."""
        reader = asyncio.create_task(self._read(exchanges))
        reader.add_done_callback(self._reader_ended)
        watch = self._watch = _StallWatch(self._admission.limits.answer_timeout_s)
        try:
            while True:
                slot = self._buffer.next()
                if slot is not None:
                    watch.is_sending = True
                    await send(slot.answer)
                    watch.is_sending = False
                    watch.sent += 1
                    self._was_sent(slot)
                elif reader.done() and (reader.exception() is not None or not self._buffer.requests):
                    break
                else:
                    self._idle = asyncio.get_running_loop().create_future()
                    await self._idle
            await reader
        except asyncio.CancelledError:
            watch.explain()
            raise
        finally:
            watch.close()
            self._admission.unsent.drop(self)
            reader.cancel()
            for task in self._running:
                task.cancel()

    def give_up(self) -> None:
        """Its answers are not taken, and others need the room."""
        if self._watch is not None:
            self._watch.give_up("the client took too few of its answers")

    async def _read(self, exchanges: AsyncIterator[Exchange[A]]) -> None:
        while True:
            while not self._buffer.has_room():
                self._room.clear()
                await self._room.wait()
            try:
                exchange = await anext(exchanges)
            except StopAsyncIteration:
                return
            self._begin(exchange)
            del exchange  # the next may be long in coming

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            reader.exception()  # seen, even where nobody asks any more
        self._wake_writer()

    def _begin(self, exchange: Exchange[A]) -> None:
        request = exchange.request
        if isinstance(request, PenstockError):
            self._put(self._buffer.begin(exchange.size_bytes, is_decoupled=False), *exchange.refuse(request))
            return
        block = self._resolve(request)
        slot = self._buffer.begin(exchange.size_bytes, block is not None and self._has_several(block))
        task = asyncio.create_task(self._answer(request, block, exchange, slot))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _has_several(self, block: BlockDescription) -> bool:
        return block.settings.is_decoupled if self._is_single else block.settings.may_stream

    def _resolve(self, request: InferRequest) -> BlockDescription | None:
        """The order of the answers depends on whether the block may give several."""
        try:
            return self._serving.resolver.choose(request)
        except PenstockError:
            return None  # serving says what is wrong, and counts it

    async def _answer(
        self, request: InferRequest, block: BlockDescription | None, exchange: Exchange[A], slot: StreamSlot[A]
    ) -> None:
        try:
            if slot.is_decoupled:
                await self._answer_often(request, block, exchange, slot)
            else:
                response = await self._serving.serve(request, block)
                self._put(slot, *await exchange.encode(response, is_decoupled=False))
        except PenstockError as error:
            self._fail(slot, exchange, error)
        except Exception:  # the client is told of a bug of ours in the protocol's own words
            log.exception("bug", where=self._where)
            self._fail(slot, exchange, InternalError(BUG))

    async def _answer_often(
        self, request: InferRequest, block: BlockDescription | None, exchange: Exchange[A], slot: StreamSlot[A]
    ) -> None:
        """Takes the next answer when the one before is sent: a client that does not read stops the model."""
        async with aclosing(self._serving.stream(request, block)) as responses:
            async for response in responses:
                self._admit()  # it may go on for long
                if response.outputs or not response.is_final or request.parameters.get(EMPTY_FINAL) is True:
                    self._put(slot, *await exchange.encode(response, is_decoupled=True), response.is_final)
                    if not response.is_final:
                        sent = self._unsent[slot] = asyncio.get_running_loop().create_future()
                        await sent
        self._end(slot)

    def _fail(self, slot: StreamSlot[A], exchange: Exchange[A], error: PenstockError) -> None:
        if not slot.is_last:
            self._put(slot, *exchange.refuse(error))

    def _put(self, slot: StreamSlot[A], answer: A, size_bytes: int, is_last: bool = True) -> None:
        self._buffer.put(slot, answer, size_bytes, is_last)
        if size_bytes > COUNTED_BYTES:
            self._admission.unsent.hold(self, size_bytes)
        self._room.set()  # the answer may be smaller than what was kept free for it
        self._wake_writer()

    def _end(self, slot: StreamSlot[A]) -> None:
        """The model has said all; perhaps without a last answer that is to be sent."""
        if not slot.is_last:
            self._buffer.end(slot)
            self._room.set()
            self._wake_writer()

    def _was_sent(self, slot: StreamSlot[A]) -> None:
        self._buffer.sent(slot)
        if slot.answer_bytes > COUNTED_BYTES:
            self._admission.unsent.take(self, slot.answer_bytes)
        self._room.set()
        if slot.is_decoupled:
            waiting = self._unsent.pop(slot, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def _wake_writer(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)


class _StallWatch:
    """Cancels its task when one answer is not taken in time. It looks now and then: most are taken at once."""

    def __init__(self, patience_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.sent = 0
        self.is_sending = False
        self._task = task
        self._patience_s = patience_s
        self._why = ""
        self._seen = -1  # what was sent when it last looked and found an answer on its way
        self._timer = asyncio.get_running_loop().call_later(patience_s, self._look)

    def explain(self) -> None:
        """Raises what a cancellation by this watch means."""
        if self._why:
            self._task.uncancel()
            raise Cancelled(self._why) from None

    def give_up(self, why: str) -> None:
        if not self._why:
            self._why = why
            self._task.cancel()

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self.is_sending and self.sent == self._seen:
            self.give_up(f"the client took no answer for {self._patience_s:g} seconds")
            return
        self._seen = self.sent if self.is_sending else -1
        self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._look)
