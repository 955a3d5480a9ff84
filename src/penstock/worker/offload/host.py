"""A task process: prepares and finishes requests for a worker, away from its interpreter lock.

`python -m penstock.worker.offload.host SOCKET BLOCK…` with inherited descriptors; it ends when the worker closes the
socket.
"""

import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from penstock.core.errors import PenstockError, WireError
from penstock.core.tensors import Tensor
from penstock.tasks.base import Prepared, Task, TaskRequest
from penstock.tasks.building import TaskSpec, build_task
from penstock.worker.offload.handoff import Block, Frames, Header, describe_prepared, frame, read_results

READ_BYTES = 256 * 1024
MAX_HELD = 4096  # the worker drops what it does not need; this bounds what it forgets to drop
SPEC = TypeAdapter(TaskSpec)
DOING = {
    "build": "building the task",
    "drop": "dropping the task",
    "prepare": "preparing the request",
    "finish": "finishing the request",
}


@dataclass(frozen=True, slots=True)
class _Held:
    """What stays here between `prepare` and `finish`: no tensors, but the task's own context."""

    task: Task
    request: TaskRequest
    prepared: Prepared


class Host:
    def __init__(self, blocks: Sequence[Block]) -> None:
        """A call's slot has two blocks, one for each direction."""
        self._slots = list(zip(blocks[::2], blocks[1::2], strict=True))
        self._tasks: dict[int, Task] = {}
        self._held: dict[int, _Held] = {}

    def answer(self, header: Header) -> Header | None:
        if header["do"] == "forget":
            self._held.pop(header["held"], None)
            return None
        answer: Header = {"call": header["call"]}
        try:
            answer.update(self._do(header))
        except PenstockError as error:
            answer["error"] = (error.code, error.message, error.fields)
        except Exception as error:  # noqa: BLE001 - whatever a task does, the next request finds it alive
            answer["error"] = ("internal", f"{DOING[header['do']]} failed: {type(error).__name__}", {})
            answer["traceback"] = traceback.format_exc()
        return answer

    def _do(self, header: Header) -> Header:
        # No table of bound methods: it would keep the host, and its memory, until the collector comes by.
        match header["do"]:
            case "build":
                return self._build(header)
            case "drop":
                return self._drop(header)
            case "prepare":
                return self._prepare(header)
            case "finish":
                return self._finish(header)
            case other:
                raise WireError(f"a task process cannot do {other!r}")

    def _build(self, header: Header) -> Header:
        self._tasks[header["task"]] = build_task(SPEC.validate_python(header["spec"]))
        return {}

    def _drop(self, header: Header) -> Header:
        self._tasks.pop(header["task"], None)
        return {}

    def _prepare(self, header: Header) -> Header:
        there, back = self._slots[header["slot"]]
        task = self._tasks[header["task"]]
        request = TaskRequest(there.read(header["there"]), header["outputs"], header["parameters"])
        prepared = task.prepare(request)
        described, tensors = describe_prepared(prepared)
        has_to_stay = prepared.context is not None or not task.is_finish_cheap
        if has_to_stay:
            self._hold(header["call"], _Held(task, _without_data(request), _without_arrays(prepared)))
        return {"prepared": described, "is_held": has_to_stay, "back": back.write(tensors)}

    def _finish(self, header: Header) -> Header:
        there, back = self._slots[header["slot"]]
        held = self._held.pop(header["held"], None)
        if held is None:
            return {"is_gone": True}
        results = read_results(header["counts"], there.read(header["there"]))
        return {"back": back.write(held.task.finish(held.request, held.prepared, results))}

    def _hold(self, number: int, held: _Held) -> None:
        self._held[number] = held
        if len(self._held) > MAX_HELD:
            del self._held[next(iter(self._held))]


def _without_data(request: TaskRequest) -> TaskRequest:
    return replace(request, inputs=[Tensor(given.name, given.datatype, given.shape, b"") for given in request.inputs])


def _without_arrays(prepared: Prepared) -> Prepared:
    return replace(prepared, pieces=[replace(piece, arrays={}) for piece in prepared.pieces])


def serve(channel: socket.socket, answer: Callable[[Header], Header | None]) -> None:
    """Until the worker leaves or dies."""
    frames = Frames()
    try:
        while data := channel.recv(READ_BYTES):
            for header in frames.feed(data):
                if (answered := answer(header)) is not None:
                    channel.sendall(frame(answered))
    except ConnectionError:  # the worker is gone
        return


def main(arguments: Iterable[str]) -> None:
    descriptor, *blocks = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which lets its requests end
    with socket.socket(fileno=descriptor) as channel:
        serve(channel, Host([Block(block) for block in blocks]).answer)


if __name__ == "__main__":
    main(sys.argv[1:])
