"""One client's stream of requests, which are read while there is room, served concurrently, and answered."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.errors import BUG_MESSAGE, Cancelled, InternalError, PenstockError
from penstock.core.principals import Principal
from penstock.core.requests import InferRequest, InferResponse
from penstock.gateway.websocket.stream_buffer import StreamBuffer, StreamSlot
from penstock.serving.serve import Serving
from penstock.telemetry.background import BackgroundTasks

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)

log = structlog.get_logger()
# Smaller answers are not counted: a stream has at most STREAM_WINDOW of them.
COUNTED_BYTES = 16 * 1024
EMPTY_FINAL_PARAMETER = "triton_enable_empty_final_response"
FINAL_PARAMETER = "triton_final_response"


class Exchange(Protocol[A_co]):
    """One message of a stream, and the encoding of its answers."""

    @property
    def request(self) -> InferRequest | PenstockError:
        """Return the request, or an error if the message could not be read."""

    @property
    def size_bytes(self) -> int: ...

    async def encode(self, response: InferResponse, is_decoupled: bool) -> tuple[A_co, int]:
        """Return the answer and its size. Raise PenstockError if the protocol cannot represent it."""

    def refuse(self, error: PenstockError) -> tuple[A_co, int]: ...


class RequestStream(Generic[A]):
    """Reads the requests of one stream, serves them, and sends their answers."""

    def __init__(
        self,
        serving: Serving,
        is_ordered: bool,
        protocol: str,
        admit: Callable[[], Principal],
        is_single: bool = False,
    ) -> None:
        """Create a stream.

        `protocol` is its name in logs. `admit` raises if the client's key has expired or was revoked. `is_single`: the
        client wants one whole answer per request if the model can give it.
        """
        self._serving = serving
        self._is_single = is_single
        self._admit = admit
        self._protocol = protocol
        self._admission = serving.admission
        self._stall_watch: _StallWatch | None = None
        self._buffer: StreamBuffer[A] = StreamBuffer(is_ordered)
        self._has_room = asyncio.Event()
        self._idle: asyncio.Future[None] | None = None  # the writer, while there is nothing to send
        self._unsent: dict[StreamSlot[A], asyncio.Future[None]] = {}  # resolved when the slot's answer was sent
        self._running = BackgroundTasks("stream")

    async def run(self, exchanges: AsyncIterator[Exchange[A]], send: Callable[[A], Awaitable[None]]) -> None:
        """Serve the stream until all answers are sent. Cancel the running requests if it fails or is cancelled."""
        reader = asyncio.create_task(self._read(exchanges))
        reader.add_done_callback(self._on_reader_end)
        watch = self._stall_watch = _StallWatch(self._admission.limits.answer_timeout_s)
        try:
            while True:
                slot = self._buffer.peek_slot()
                if slot is not None:
                    watch.is_sending = True
                    await send(slot.answer)
                    watch.is_sending = False
                    watch.sent += 1
                    self._on_answer_sent(slot)
                elif reader.done() and (reader.exception() is not None or not self._buffer.requests):
                    break
                else:
                    self._idle = asyncio.get_running_loop().create_future()
                    await self._idle
            await reader
        except asyncio.CancelledError:
            watch.raise_reason()
            raise
        finally:
            watch.close()
            self._admission.unsent.drop(self)
            reader.cancel()
            self._running.cancel()

    def disconnect_client(self) -> None:
        """End the stream, because its client does not read the answers and other clients need the memory."""
        if self._stall_watch is not None:
            self._stall_watch.disconnect_client("the client read its answers too slowly")

    async def _read(self, exchanges: AsyncIterator[Exchange[A]]) -> None:
        while True:
            while not self._buffer.has_room():
                self._has_room.clear()
                await self._has_room.wait()
            try:
                exchange = await anext(exchanges)
            except StopAsyncIteration:
                return
            self._begin_request(exchange)
            del exchange  # free it while the next one is awaited

    def _on_reader_end(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            reader.exception()  # mark it as retrieved; `run` may have ended
        self._wake_writer()

    def _begin_request(self, exchange: Exchange[A]) -> None:
        request = exchange.request
        if isinstance(request, PenstockError):
            self._put_answer(self._buffer.begin(exchange.size_bytes, is_decoupled=False), *exchange.refuse(request))
            return
        block = self._resolve_block(request)
        slot = self._buffer.begin(exchange.size_bytes, block is not None and self._has_several_answers(block))
        self._running.spawn(self._answer(request, block, exchange, slot))

    def _has_several_answers(self, block: BlockDescription) -> bool:
        return block.settings.is_decoupled if self._is_single else block.settings.may_stream

    def _resolve_block(self, request: InferRequest) -> BlockDescription | None:
        """Return the request's block, which shows whether it may give several answers; None on an error."""
        try:
            return self._serving.resolver.choose(request)
        except PenstockError:
            return None  # `serve` raises the error again, and counts it

    async def _answer(
        self, request: InferRequest, block: BlockDescription | None, exchange: Exchange[A], slot: StreamSlot[A]
    ) -> None:
        try:
            if slot.is_decoupled:
                await self._answer_decoupled(request, block, exchange, slot)
            else:
                response = await self._serving.serve(request, block)
                self._put_answer(slot, *await exchange.encode(response, is_decoupled=False))
        except PenstockError as error:
            self._put_error(slot, exchange, error)
        except Exception:  # a bug in Penstock; the client receives an error of the protocol
            log.exception("bug", where=self._protocol)
            self._put_error(slot, exchange, InternalError(BUG_MESSAGE))

    async def _answer_decoupled(
        self, request: InferRequest, block: BlockDescription | None, exchange: Exchange[A], slot: StreamSlot[A]
    ) -> None:
        """Send each answer before requesting the next, so that a client that does not read pauses the model."""
        async with aclosing(self._serving.stream(request, block)) as responses:
            async for response in responses:
                self._admit()  # the key may expire during a long stream
                if response.outputs or not response.is_final or request.parameters.get(EMPTY_FINAL_PARAMETER) is True:
                    self._put_answer(slot, *await exchange.encode(response, is_decoupled=True), response.is_final)
                    if not response.is_final:
                        sent = self._unsent[slot] = asyncio.get_running_loop().create_future()
                        await sent
        self._end_request(slot)

    def _put_error(self, slot: StreamSlot[A], exchange: Exchange[A], error: PenstockError) -> None:
        if not slot.is_last:
            self._put_answer(slot, *exchange.refuse(error))

    def _put_answer(self, slot: StreamSlot[A], answer: A, size_bytes: int, is_last: bool = True) -> None:
        self._buffer.put(slot, answer, size_bytes, is_last)
        if size_bytes > COUNTED_BYTES:
            self._admission.unsent.hold(self, size_bytes)
        self._has_room.set()  # the answer may be smaller than the memory reserved for it
        self._wake_writer()

    def _end_request(self, slot: StreamSlot[A]) -> None:
        """End a request whose model may have sent no answer marked as the last."""
        if not slot.is_last:
            self._buffer.end(slot)
            self._has_room.set()
            self._wake_writer()

    def _on_answer_sent(self, slot: StreamSlot[A]) -> None:
        self._buffer.mark_sent(slot)
        if slot.answer_bytes > COUNTED_BYTES:
            self._admission.unsent.take(self, slot.answer_bytes)
        self._has_room.set()
        if slot.is_decoupled:
            waiting = self._unsent.pop(slot, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def _wake_writer(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)


class _StallWatch:
    """Cancels its task if one answer is not sent in time.

    The watch checks periodically, because a timeout for each answer would cost more.
    """

    def __init__(self, patience_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.sent = 0
        self.is_sending = False
        self._task = task
        self._patience_s = patience_s
        self._why = ""
        self._seen = -1  # the value of `mark_sent` at the last check, if an answer was being sent then
        self._timer = asyncio.get_running_loop().call_later(patience_s, self._check)

    def raise_reason(self) -> None:
        """Raise Cancelled with the reason if this watch cancelled the task."""
        if self._why:
            self._task.uncancel()
            raise Cancelled(self._why) from None

    def disconnect_client(self, why: str) -> None:
        if not self._why:
            self._why = why
            self._task.cancel()

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if self.is_sending and self.sent == self._seen:
            self.disconnect_client(f"the client read no answer for {self._patience_s:g} seconds")
            return
        self._seen = self.sent if self.is_sending else -1
        self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._check)
