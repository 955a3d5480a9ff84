"""The worker's side of a task process: starts the process, sends calls, and ends the process."""

import asyncio
import itertools
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import structlog
from pydantic import TypeAdapter

from penstock.core.errors import Cancelled, PenstockError, rebuild_error
from penstock.core.tensors import Array, Tensor
from penstock.models.building import TaskSpec
from penstock.tasks.base import Prepared, TaskRequest
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.ipc_messages import Envelope, Inbox, Message
from penstock.worker.offload.task_messages import describe_results, read_prepared

log = structlog.get_logger()
T = TypeVar("T")
SLOTS = 2  # shared-memory areas: one is used by the current call while the next call's data is copied into the other
CALL_S = 60.0  # a process that takes longer for a call is considered to hang
END_S = 2.0  # time for a process to end
IN_THREAD_BYTES = 1024 * 1024  # copying more would block the event loop
SPEC = TypeAdapter(TaskSpec)


class ProcessLost(Exception):
    """The process ended before it answered."""


class ContextLost(Exception):
    """The process no longer has the context of the request that it should finish."""


class RemoteContext:
    """Refers to a request's context that stays in a task process. Deleting this object deletes the context."""

    __slots__ = ("number", "process")

    def __init__(self, process: "TaskProcess", number: int) -> None:
        self.process = process
        self.number = number

    def take_number(self) -> int:
        """Return the context's number for the `finish` call, which deletes the context."""
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
    """Sends calls to a running task process, and ends the process."""

    def __init__(self, process: "subprocess.Popen[bytes]", slots: Sequence[_CallSlot]) -> None:
        self.ended = asyncio.Event()
        self.built: dict[int, PenstockError | None] = {}  # by task: the error that prevented building it, or None
        self.load = 0  # unanswered calls
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._free = list(slots)
        # Calls that wait for a slot, by task; tasks take turns. The number of the worker's jobs bounds the number of
        # calls.
        self._queues: dict[int, deque[asyncio.Future[_CallSlot]]] = {}
        self._waiting: dict[int, asyncio.Future[Envelope | None]] = {}  # the result None means that the process is lost
        self._numbers = itertools.count(1)
        self._inbox = Inbox()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(cls) -> "TaskProcess":
        """Start a task process and connect to it; raise OSError if it cannot be started."""
        slots = [_CallSlot(number, Arena.create(), Arena.create()) for number in range(SLOTS)]
        connection, process = _start_process([arena for slot in slots for arena in (slot.outgoing, slot.incoming)])
        opened = cls(process, slots)
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: opened, sock=connection)
        except BaseException:
            connection.close()
            opened.kill()
            raise
        return opened

    @property
    def pid(self) -> int:
        return self._process.pid

    async def build(self, task: int, spec: TaskSpec) -> None:
        """Build a task. If that fails, keep the error in `built`, so that only calls for this task fail."""
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
            raise rebuild_error(failure.code, failure.message, failure.fields)
        fields = {"task": task, "outputs": request.outputs, "parameters": dict(request.parameters)}
        answer = await self._call("prepare", fields, request.inputs, is_wanted)
        prepared = read_prepared(answer.fields["prepared"], answer.tensors)
        if answer.fields["is_held"]:
            prepared.context = RemoteContext(self, answer.fields["call"])
        return prepared

    async def finish(self, context: RemoteContext, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        counts, tensors = describe_results(results)
        answer = await self._call("finish", {"held": context.take_number(), "counts": counts}, tensors)
        if answer.kind == "gone":
            raise ContextLost
        return list(answer.tensors)

    def forget(self, number: int) -> None:
        """Drop the context of a request that will not be finished. This method may be called in any thread."""
        with suppress(RuntimeError):  # the loop has closed, and the process ends with it
            self._loop.call_soon_threadsafe(self._send_forget, number)

    def _send_forget(self, number: int) -> None:
        with suppress(ProcessLost):
            self._send(Message("forget", {"held": number}).pack())

    def kill(self) -> None:
        """Kill the process; its unanswered calls fail with ProcessLost."""
        if self._transport is not None:
            self._transport.abort()
        self._process.kill()
        self._process.wait()  # does not block: a killed process ends at once

    async def close(self) -> None:
        """Close the connection, and wait until the process has ended."""
        if self._transport is not None:
            self._transport.close()
        try:
            await asyncio.to_thread(self._process.wait, END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        except asyncio.CancelledError:
            self.kill()
            raise
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
        self._free.clear()  # free the memory now, without waiting for a garbage collection
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)
        while (waiter := self._pop_next_waiter()) is not None:
            waiter.set_exception(ProcessLost())

    # --- calls

    async def _call(
        self,
        kind: str,
        fields: dict[str, Any],
        tensors: Sequence[Tensor] = (),
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Message:
        """Send the process a message and return the answer.

        Do not cancel this call: until the answer arrives, the process may use the call's shared memory.
        """
        self.load += 1
        try:
            slot = await self._take_slot(fields.get("task", 0))
            try:
                if not is_wanted():
                    raise Cancelled("the request was cancelled before it was prepared")
                answer = await self._send_and_receive(kind, fields, tensors, slot)
            finally:
                self._release_slot(slot)
        finally:
            self.load -= 1
        if answer.kind == "failed":
            raise _read_error(answer)
        return answer

    async def _send_and_receive(
        self, kind: str, fields: dict[str, Any], tensors: Sequence[Tensor], slot: _CallSlot
    ) -> Message:
        number = next(self._numbers)
        self._waiting[number] = answered = self._loop.create_future()
        hanging = self._loop.call_later(CALL_S, self._kill_hanging)
        try:
            message = Message(kind, {"call": number, **fields}, tensors, slot.number)
            self._send(await _run_copy(message.size_bytes, message.pack, slot.outgoing))
            envelope = await answered
            if envelope is None:
                raise ProcessLost
            return await _run_copy(envelope.size_bytes, envelope.open, slot.incoming)
        finally:
            hanging.cancel()
            del self._waiting[number]

    def _kill_hanging(self) -> None:
        log.error("task_process_timed_out", pid=self.pid)
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

    def _release_slot(self, slot: _CallSlot) -> None:
        if (waiter := self._pop_next_waiter()) is not None:
            waiter.set_result(slot)
        elif not self.ended.is_set():
            self._free.append(slot)

    def _pop_next_waiter(self) -> "asyncio.Future[_CallSlot] | None":
        for task, queue in self._queues.items():
            waiter = queue.popleft()
            del self._queues[task]
            if queue:
                self._queues[task] = queue  # behind the other tasks
            return waiter
        return None


def _start_process(arenas: Sequence[Arena]) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    """Start a process that shares the memory `arenas`; return the socket to the process, and the process."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            inherited = [theirs.fileno(), *(arena.fd for arena in arenas)]
            command = [sys.executable, "-m", "penstock.worker.offload.task_host", *map(str, inherited)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=inherited)
    except OSError:
        ours.close()
        raise
    return ours, process


async def _run_copy(size_bytes: int, copy: Callable[[Arena], T], arena: Arena) -> T:
    return copy(arena) if size_bytes < IN_THREAD_BYTES else await asyncio.to_thread(copy, arena)


def _read_error(answer: Message) -> PenstockError:
    if "traceback" in answer.fields:
        log.error("task_failed", traceback=answer.fields["traceback"])
    return rebuild_error(*answer.fields["error"])
