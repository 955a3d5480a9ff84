"""One task process, or task worker, as a worker sees it: calls to it, and its end."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import structlog
from pydantic import TypeAdapter

from penstock.core.errors import Cancelled, PenstockError, from_code
from penstock.core.tensors import Array, Tensor
from penstock.models.building import TaskSpec
from penstock.tasks.base import Prepared, TaskRequest
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.messages import Envelope, Inbox, Message
from penstock.worker.offload.contents import describe_results, read_prepared
from penstock.worker.offload.peer import TaskPeer

log = structlog.get_logger()
T = TypeVar("T")
SLOTS = 2  # one is worked on while the next is filled
CALL_S = 60.0  # a process that takes longer hangs
IN_THREAD_BYTES = 1024 * 1024  # copying more would hold up the loop
SPEC = TypeAdapter(TaskSpec)


class ProcessLost(Exception):
    """It ended before it answered."""


class ContextLost(Exception):
    """It does not have what it kept of the request any more."""


class RemoteContext:
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
class _CallSlot:
    number: int
    outgoing: Arena
    incoming: Arena


class TaskProcess(asyncio.Protocol):
    def __init__(self, peer: TaskPeer, slots: Sequence[_CallSlot]) -> None:
        self.ended = asyncio.Event()
        self.built: dict[int, PenstockError | None] = {}  # task to why it could not be built
        self.load = 0  # calls that it has not answered
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self._free = list(slots)
        # Calls without a slot, by task: each has its turn. A worker's jobs bound them.
        self._queues: dict[int, deque[asyncio.Future[_CallSlot]]] = {}
        self._waiting: dict[int, asyncio.Future[Envelope | None]] = {}  # None: the process is lost
        self._numbers = itertools.count(1)
        self._inbox = Inbox()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(cls, reach: Callable[[Sequence[Arena]], TaskPeer]) -> "TaskProcess":
        """`reach` starts a process, or connects to a task worker: it raises OSError where that is away."""
        slots = [_CallSlot(number, Arena.create(), Arena.create()) for number in range(SLOTS)]
        peer = reach([arena for slot in slots for arena in (slot.outgoing, slot.incoming)])
        try:
            opened = cls(peer, slots)
            peer.connection.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: opened, sock=peer.connection)
        except BaseException:
            peer.connection.close()
            peer.kill()
            raise
        return opened

    @property
    def pid(self) -> int:
        return self._peer.pid

    async def build(self, task: int, spec: TaskSpec) -> None:
        """A failure is kept in `built`: it fails the calls for this task, and nothing else."""
        try:
            await self._call("build", {"task": task, "spec": SPEC.dump_python(spec, mode="json")})
            self.built[task] = None
        except PenstockError as error:
            self.built[task] = error

    async def drop(self, task: int) -> None:
        self.built.pop(task, None)
        await self._call("drop", {"task": task})

    async def prepare(self, task: int, request: TaskRequest, is_wanted: Callable[[], bool] = lambda: True) -> Prepared:
        if (failure := self.built[task]) is not None:
            raise from_code(failure.code, failure.message, failure.fields)
        fields = {"task": task, "outputs": request.outputs, "parameters": dict(request.parameters)}
        answer = await self._call("prepare", fields, request.inputs, is_wanted)
        prepared = read_prepared(answer.fields["prepared"], answer.tensors)
        if answer.fields["is_held"]:
            prepared.context = RemoteContext(self, answer.fields["call"])
        return prepared

    async def finish(self, held: RemoteContext, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        counts, tensors = describe_results(results)
        answer = await self._call("finish", {"held": held.take(), "counts": counts}, tensors)
        if answer.kind == "gone":
            raise ContextLost
        return list(answer.tensors)

    def forget(self, number: int) -> None:
        """Nobody will finish that request. May be called in any thread."""
        with suppress(RuntimeError):  # the loop has closed, and the process will
            self._loop.call_soon_threadsafe(self._tell_forgotten, number)

    def _tell_forgotten(self, number: int) -> None:
        with suppress(ProcessLost):
            self._send(Message("forget", {"held": number}).pack())

    def kill(self) -> None:
        """Ends the process if it is ours; calls to it are lost at once."""
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
        for answer in self._inbox.feed(data):
            future = self._waiting.get(answer.fields["call"])
            if future is not None and not future.done():
                future.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self._free.clear()  # the memory goes now, and not when the collector comes by
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)
        while (waiter := self._next_waiter()) is not None:
            waiter.set_exception(ProcessLost())

    # --- calls

    async def _call(
        self,
        kind: str,
        fields: dict[str, Any],
        tensors: Sequence[Tensor] = (),
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Message:
        """Must not be cancelled: until the answer is there, the process may read and write the call's slot."""
        self.load += 1
        try:
            slot = await self._take_slot(fields.get("task", 0))
            try:
                if not is_wanted():
                    raise Cancelled("nobody waits for this request any more")
                answer = await self._exchange(kind, fields, tensors, slot)
            finally:
                self._give_slot(slot)
        finally:
            self.load -= 1
        if answer.kind == "failed":
            raise _as_error(answer)
        return answer

    async def _exchange(self, kind: str, fields: dict[str, Any], tensors: Sequence[Tensor], slot: _CallSlot) -> Message:
        number = next(self._numbers)
        self._waiting[number] = answered = self._loop.create_future()
        hanging = self._loop.call_later(CALL_S, self._end_hanging)
        try:
            message = Message(kind, {"call": number, **fields}, tensors, slot.number)
            self._send(await _copy(message.size_bytes, message.pack, slot.outgoing))
            envelope = await answered
            if envelope is None:
                raise ProcessLost
            return await _copy(envelope.size_bytes, envelope.open, slot.incoming)
        finally:
            hanging.cancel()
            del self._waiting[number]

    def _end_hanging(self) -> None:
        log.error("task_process_hangs", pid=self.pid)
        self.kill()
        self.connection_lost(None)

    def _send(self, packed: bytes) -> None:
        if self.ended.is_set() or self._transport is None:
            raise ProcessLost
        self._transport.write(packed)

    async def _take_slot(self, task: int) -> _CallSlot:
        if self.ended.is_set():
            raise ProcessLost
        if self._free:
            return self._free.pop()
        waiter: asyncio.Future[_CallSlot] = self._loop.create_future()
        self._queues.setdefault(task, deque()).append(waiter)
        return await waiter

    def _give_slot(self, slot: _CallSlot) -> None:
        if (waiter := self._next_waiter()) is not None:
            waiter.set_result(slot)
        elif not self.ended.is_set():
            self._free.append(slot)

    def _next_waiter(self) -> "asyncio.Future[_CallSlot] | None":
        for task, queue in self._queues.items():
            waiter = queue.popleft()
            del self._queues[task]
            if queue:
                self._queues[task] = queue  # behind the others
            return waiter
        return None


async def _copy(size_bytes: int, copy: Callable[[Arena], T], arena: Arena) -> T:
    return copy(arena) if size_bytes < IN_THREAD_BYTES else await asyncio.to_thread(copy, arena)


def _as_error(answer: Message) -> PenstockError:
    if "traceback" in answer.fields:
        log.error("task_failed", traceback=answer.fields["traceback"])
    return from_code(*answer.fields["error"])
