"""One task process, or task worker, as a worker sees it: calls to it, and its end."""

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import structlog
from pydantic import TypeAdapter

from penstock.core.errors import PenstockError, from_code
from penstock.core.tensors import Array, Tensor
from penstock.tasks.base import Prepared, TaskRequest
from penstock.tasks.building import TaskSpec
from penstock.worker.offload.handoff import (
    Block,
    Frames,
    Header,
    describe_request,
    describe_results,
    frame,
    read_prepared,
)
from penstock.worker.offload.peer import Peer, connect_worker, start_process

log = structlog.get_logger()
T = TypeVar("T")
SLOTS = 2  # one is worked on while the next is filled
CALL_S = 60.0  # a process that takes longer hangs
IN_THREAD_BYTES = 1024 * 1024  # copying more would hold up the loop
SPEC = TypeAdapter(TaskSpec)
LOST: Header = {}  # in place of an answer


class ProcessLost(Exception):
    """It ended before it answered."""


class ContextLost(Exception):
    """It does not have what it kept of the request any more."""


class Held:
    """Stands for a context that stayed in its process; dropped there when it is dropped here."""

    __slots__ = ("number", "process")

    def __init__(self, process: "TaskProcess", number: int) -> None:
        self.process = process
        self.number = number

    def take(self) -> int:
        """The number, for the one call that ends it there."""
        number, self.number = self.number, 0
        return number

    def __del__(self) -> None:
        if self.number:
            self.process.forget(self.number)


@dataclass(frozen=True, slots=True)
class _Slot:
    number: int
    there: Block
    back: Block


class TaskProcess(asyncio.Protocol):
    def __init__(self, peer: Peer, slots: Sequence[_Slot]) -> None:
        self.ended = asyncio.Event()
        self.built: dict[int, PenstockError | None] = {}  # task to why it could not be built
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self._free = list(slots)
        self._queue: deque[asyncio.Future[_Slot]] = deque()  # calls that wait for a slot; a worker's jobs bound them
        self._waiting: dict[int, asyncio.Future[Header]] = {}
        self._numbers = itertools.count(1)
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def start(cls) -> "TaskProcess":
        """A process of this worker alone."""
        return await cls._open(start_process)

    @classmethod
    async def connect(cls, path: Path) -> "TaskProcess":
        """A task worker, at its socket. Raises OSError where it is away."""
        return await cls._open(partial(connect_worker, path))

    @classmethod
    async def _open(cls, reach: Callable[[Sequence[int]], tuple[Peer, socket.socket]]) -> "TaskProcess":
        slots = [_Slot(number, Block.create(), Block.create()) for number in range(SLOTS)]
        peer, channel = reach([block.descriptor for slot in slots for block in (slot.there, slot.back)])
        try:
            opened = cls(peer, slots)
            channel.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: opened, sock=channel)
        except BaseException:
            channel.close()
            peer.kill()
            raise
        return opened

    @property
    def pid(self) -> int:
        return self._peer.pid

    @property
    def load(self) -> int:
        """Calls that it has not answered."""
        return len(self._waiting) + len(self._queue)

    async def build(self, task: int, spec: TaskSpec) -> None:
        """Its failure is kept in `built`: it fails the calls for this task, and nothing else."""
        try:
            await self._call({"do": "build", "task": task, "spec": SPEC.dump_python(spec, mode="json")})
            self.built[task] = None
        except PenstockError as error:
            self.built[task] = error

    async def drop(self, task: int) -> None:
        self.built.pop(task, None)
        await self._call({"do": "drop", "task": task})

    async def prepare(self, task: int, request: TaskRequest) -> Prepared:
        if (failure := self.built[task]) is not None:
            raise from_code(failure.code, failure.message, failure.fields)
        header = {"do": "prepare", "task": task, **describe_request(request)}
        answer, tensors = await self._call(header, request.inputs)
        prepared = read_prepared(answer["prepared"], tensors)
        if answer["is_held"]:
            prepared.context = Held(self, answer["call"])
        return prepared

    async def finish(self, held: Held, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        counts, tensors = describe_results(results)
        answer, outputs = await self._call({"do": "finish", "held": held.take(), "counts": counts}, tensors)
        if "is_gone" in answer:
            raise ContextLost
        return outputs

    def forget(self, number: int) -> None:
        """In any thread: nobody will finish that request."""
        with suppress(RuntimeError):  # the loop has closed, and the process will
            self._loop.call_soon_threadsafe(self._tell_forgotten, number)

    def _tell_forgotten(self, number: int) -> None:
        with suppress(ProcessLost):
            self._send({"do": "forget", "held": number})

    def kill(self) -> None:
        """Its calls are lost, at once."""
        if self._transport is not None:
            self._transport.abort()
        self._peer.kill()

    async def close(self) -> None:
        """Returns when it has ended, or has nothing of ours any more."""
        if self._transport is not None:
            self._transport.close()
        try:
            await self._peer.leave()
        finally:
            self.connection_lost(None)

    # --- asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for answer in self._frames.feed(data):
            future = self._waiting.get(answer["call"])
            if future is not None and not future.done():
                future.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self._free.clear()  # the memory goes now, and not when the collector comes by
        for future in self._waiting.values():
            if not future.done():
                future.set_result(LOST)
        while self._queue:
            self._queue.popleft().set_exception(ProcessLost())

    # --- calls

    async def _call(self, header: Header, tensors: Sequence[Tensor] = ()) -> tuple[Header, list[Tensor]]:
        """Must not be cancelled: until the answer is there, the process may read and write the call's slot."""
        slot = await self._take_slot()
        number = next(self._numbers)
        answered = self._waiting[number] = self._loop.create_future()
        try:
            written = await _copy(sum(len(tensor.data) for tensor in tensors), slot.there.write, tensors)
            self._send({"call": number, "slot": slot.number, "there": written, **header})
            async with asyncio.timeout(CALL_S):
                answer = await answered
            if answer is LOST:
                raise ProcessLost
            if "error" in answer:
                raise _as_error(answer)
            if "back" not in answer:
                return answer, []
            return answer, await _copy(_size(answer["back"]), slot.back.read, answer["back"])
        except TimeoutError as error:
            log.error("task_process_hangs", pid=self.pid)
            self.kill()
            raise ProcessLost from error
        finally:
            del self._waiting[number]
            self._give_slot(slot)

    def _send(self, header: Header) -> None:
        if self.ended.is_set() or self._transport is None:
            raise ProcessLost
        self._transport.write(frame(header))

    async def _take_slot(self) -> _Slot:
        if self.ended.is_set():
            raise ProcessLost
        if self._free:
            return self._free.pop()
        waiter: asyncio.Future[_Slot] = self._loop.create_future()
        self._queue.append(waiter)
        return await waiter

    def _give_slot(self, slot: _Slot) -> None:
        if self._queue:
            self._queue.popleft().set_result(slot)
        elif not self.ended.is_set():
            self._free.append(slot)


async def _copy(size_bytes: int, copy: Callable[[Any], T], what: Any) -> T:
    return copy(what) if size_bytes < IN_THREAD_BYTES else await asyncio.to_thread(copy, what)


def _size(written: Header) -> int:
    return sum(size for *_, size in written["tensors"])


def _as_error(answer: Header) -> PenstockError:
    if "traceback" in answer:
        log.error("task_failed", traceback=answer["traceback"])
    return from_code(*answer["error"])
