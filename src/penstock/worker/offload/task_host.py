"""The program of a task process, which prepares and finishes requests for a worker, outside its interpreter.

`python -m penstock.worker.offload.task_host SOCKET ARENA…` runs a task process with inherited descriptors. The
process ends when the worker closes the socket.
"""

import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from penstock.core.errors import PenstockError, WireError
from penstock.core.tensors import Tensor
from penstock.models.building import TaskSpec, build_task
from penstock.tasks.base import AnyTask, Prepared, TaskRequest
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.ipc_channel import IpcChannel, PeerGone
from penstock.wire.ipc.ipc_messages import Message
from penstock.worker.offload.task_messages import describe_prepared, read_results

MAX_UNFINISHED = 4096  # above it, the oldest context is dropped, in case the worker failed to drop contexts
SPEC = TypeAdapter(TaskSpec)
DOING = {
    "build": "building the task",
    "drop": "dropping the task",
    "prepare": "preparing the request",
    "finish": "finishing the request",
}


@dataclass(frozen=True, slots=True)
class _UnfinishedRequest:
    """A request between `prepare` and `finish`: the task's context, without tensors."""

    task: AnyTask
    request: TaskRequest
    prepared: Prepared


class TaskHost:
    """Runs the tasks of a task process, and keeps requests that are prepared but not finished."""

    def __init__(self) -> None:
        self._tasks: dict[int, AnyTask] = {}
        self._unfinished: dict[int, _UnfinishedRequest] = {}

    def answer(self, message: Message) -> Message | None:
        fields = message.fields
        if message.kind == "forget":
            self._unfinished.pop(fields["held"], None)
            return None
        try:
            answer = self._run_call(message)
        except PenstockError as error:
            answer = Message("failed", {"error": (error.code, error.message, error.fields)})
        except Exception as error:  # noqa: BLE001 - a failing task must not end the process
            text = f"{DOING[message.kind]} failed: {type(error).__name__}"
            answer = Message("failed", {"error": ("internal", text, {}), "traceback": traceback.format_exc()})
        answer.fields["call"], answer.slot = fields["call"], message.slot
        return answer

    def _run_call(self, message: Message) -> Message:
        # Not a table of bound methods: such a reference cycle would keep the memory until a garbage collection.
        fields = message.fields
        match message.kind:
            case "build":
                self._tasks[fields["task"]] = build_task(SPEC.validate_python(fields["spec"]))
                return Message("built")
            case "drop":
                self._tasks.pop(fields["task"], None)
                return Message("dropped")
            case "prepare":
                return self._prepare_request(message)
            case "finish":
                return self._finish_request(message)
            case other:
                raise WireError(f"unknown message {other!r} for a task process")

    def _prepare_request(self, message: Message) -> Message:
        fields = message.fields
        task = self._tasks[fields["task"]]
        request = TaskRequest(list(message.tensors), fields["outputs"], fields["parameters"])
        prepared = task.prepare(request)
        described, tensors = describe_prepared(prepared)
        has_to_stay = prepared.context is not None or not task.is_finish_cheap
        if has_to_stay:
            inputs = [Tensor(given.name, given.datatype, given.shape, b"") for given in request.inputs]
            pieces = [replace(piece, arrays={}) for piece in prepared.pieces]
            kept = _UnfinishedRequest(task, replace(request, inputs=inputs), replace(prepared, pieces=pieces))
            self._unfinished[fields["call"]] = kept
            if len(self._unfinished) > MAX_UNFINISHED:
                del self._unfinished[next(iter(self._unfinished))]
        return Message("prepared", {"prepared": described, "is_held": has_to_stay}, tensors)

    def _finish_request(self, message: Message) -> Message:
        kept = self._unfinished.pop(message.fields["held"], None)
        if kept is None:
            return Message("gone")
        results = read_results(message.fields["counts"], message.tensors)
        return Message("finished", tensors=kept.task.finish(kept.request, kept.prepared, results))


def serve(connection: socket.socket, arenas: Sequence[Arena], answer: Callable[[Message], Message | None]) -> None:
    """Answer messages until the worker ends, then raise PeerGone.

    `arenas`: shared memory, two areas for each call at a time: one for the worker's message, and one for the answer.
    """
    channel = IpcChannel(connection, arenas[1::2], arenas[::2])
    while True:
        if (answered := answer(channel.receive())) is not None:
            channel.send(answered)


def main(arguments: Iterable[str]) -> None:
    descriptor, *arenas = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which finishes its requests first
    with socket.socket(fileno=descriptor) as connection, suppress(PeerGone):
        serve(connection, [Arena(arena) for arena in arenas], TaskHost().answer)


if __name__ == "__main__":
    main(sys.argv[1:])
