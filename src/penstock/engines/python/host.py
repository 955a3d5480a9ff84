"""The program of a Python model's process: loads the model, then answers its engine one message at a time.

    python -m penstock.engines.python.host <socket> <memory in> <memory out> <the engine's process id>

Nothing here or in what it imports knows of the worker: the model's code has the process for itself.
"""

import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.core.error_text import shorten
from penstock.core.errors import DeviceOutOfMemory, EngineFailed, InvalidRequest
from penstock.core.tensors import TensorSpec, to_array
from penstock.engines.hosting.inside import inherit
from penstock.engines.out_of_memory import out_of_memory
from penstock.engines.python import model as python_model
from penstock.engines.python.limit import MIB, is_out_of_memory, set_limit, widen_limit
from penstock.engines.python.model import ModelContext, RequestContext, answers_of, describe, load_model, to_tensors
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.channel import Channel, PeerGone
from penstock.wire.ipc.messages import Message

_OURS = (__file__, python_model.__file__)


class ModelHost:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._limit: int | None = None  # of its memory
        self._wide_limit: tuple[int, int] | None = None
        self._model: Any = None
        self._outputs: tuple[TensorSpec, ...] = ()
        self._sessions: dict[str, dict[Any, Any]] = {}
        self._streams: dict[int, Iterator[object]] = {}
        self._handlers: Mapping[str, Callable[[Message], Message]] = {
            "load": self._load,
            "infer": self._infer,
            "stream": self._stream,
            "next": lambda message: self._answer_of(message.fields["stream"]),
            "close": self._close,
            "end_session": self._end_session,
            "ping": lambda message: Message("pong"),
        }

    def run(self) -> None:
        """Answers until the engine says stop, or is gone."""
        try:
            while (message := self._receive()).kind != "stop":
                reply = self._answer(message)
                if os.getpid() != self._pid:
                    os._exit(1)  # a process that the model forked, and that came back here, must not speak for this one
                reply.fields["call"] = message.fields["call"]
                self._channel.send(reply)
        except PeerGone:
            return
        self._stop()

    def _receive(self) -> Message:
        try:
            return self._channel.receive()
        except MemoryError:
            self._make_room()
            sys.stderr.write(f"the tensors of a request do not fit into the model's memory{self._advice()}\n")
            os._exit(1)

    def _answer(self, message: Message) -> Message:
        try:
            return self._handlers[message.kind](message)
        except (EngineFailed, InvalidRequest) as error:
            return _failed(error.code, error.message, str(error.reason))
        except (SystemExit, KeyboardInterrupt):
            raise
        except MemoryError as error:
            return self._out_of_memory(error)
        except BaseException as error:  # noqa: BLE001 - it is the model's, and goes to whoever asked
            if is_out_of_memory(error):
                return self._out_of_memory(error)
            lacks_device = "cuda" in str(error).lower() and out_of_memory(error, "the GPU") is not None
            kind = DeviceOutOfMemory if lacks_device else EngineFailed
            return _failed(kind.code, f"the model failed: {describe(error, _OURS)}")

    def _out_of_memory(self, error: BaseException) -> Message:
        """The engine ends this process when it has the answer."""
        self._make_room()
        reply = _failed(EngineFailed.code, f"the model ran out of memory{self._advice()}: {describe(error, _OURS)}")
        reply.fields["is_out_of_memory"] = True
        return reply

    def _make_room(self) -> None:
        """Lets the answer, or the last words, be written."""
        if self._wide_limit:
            widen_limit(self._wide_limit)

    def _advice(self) -> str:
        if not self._limit:
            return ""
        return f" ({self._limit // MIB} MiB: python.memory_mb; set more, or look for what the model keeps)"

    def _load(self, message: Message) -> Message:
        fields = message.fields
        self._limit = fields["memory_bytes"]
        if self._limit:
            self._wide_limit = set_limit(self._limit)
        file = Path(fields["file"])
        self._outputs = tuple(TensorSpec(name, datatype, tuple(shape)) for name, datatype, shape in fields["outputs"])
        context = ModelContext(folder=file.parent, **fields["context"])
        self._model = load_model(file, fields["class_name"], fields["is_decoupled"], context)
        return Message("loaded")

    def _infer(self, message: Message) -> Message:
        context = self._begin(message)
        answer = self._model.infer(_inputs(message), context)
        return Message("answer", tensors=to_tensors(answer, self._outputs))

    def _stream(self, message: Message) -> Message:
        number = message.fields["call"]
        context = self._begin(message)
        self._streams[number] = answers_of(self._model.infer(_inputs(message), context))
        return self._answer_of(number)

    def _answer_of(self, number: int) -> Message:
        answers = self._streams[number]
        try:
            answer = next(answers)
            return Message("answer", {"stream": number}, to_tensors(answer, self._outputs))
        except StopIteration:
            del self._streams[number]
            return Message("end")
        except BaseException:
            del self._streams[number]
            _close(answers)
            raise

    def _close(self, message: Message) -> Message:
        answers = self._streams.pop(message.fields["stream"], None)
        if answers is not None:
            _close(answers)
        return Message("end")

    # --- sessions

    def _begin(self, message: Message) -> RequestContext:
        context = RequestContext(**message.fields["context"])
        session_id = context.session_id
        if not session_id:
            return context
        if context.is_start:
            self._drop_session(session_id, "started anew")
        if session_id not in self._sessions:
            self._call_hook("start_session", session_id)
            self._sessions[session_id] = {}
        context.session = self._sessions[session_id]
        return context

    def _end_session(self, message: Message) -> Message:
        self._drop_session(message.fields["session_id"], message.fields["reason"])
        return Message("ended")

    def _drop_session(self, session_id: str, reason: str) -> None:
        if self._sessions.pop(session_id, None) is None:
            return
        try:
            self._call_hook("end_session", session_id, reason)
        except Exception:  # noqa: BLE001 - the session is over all the same; what it printed is logged
            traceback.print_exc()

    def _call_hook(self, name: str, *arguments: str) -> None:
        hook = getattr(self._model, name, None)
        if hook is not None:
            hook(*arguments)

    def _stop(self) -> None:
        for answers in self._streams.values():
            try:
                _close(answers)
            except Exception:  # noqa: BLE001 - the model has still to be closed
                traceback.print_exc()
        self._call_hook("close")


def _inputs(message: Message) -> dict[str, Any]:
    return {tensor.name: to_array(tensor) for tensor in message.tensors}


def _close(answers: Iterator[object]) -> None:
    close = getattr(answers, "close", None)
    if close is not None:
        close()


def _failed(code: str, text: str, reason: str = "") -> Message:
    # A lone surrogate, as in the name of a file, could not travel on.
    text = shorten(text.encode("utf-8", "backslashreplace").decode())
    return Message("failed", {"code": code, "message": text, "reason": reason})


def main() -> None:
    connection, incoming, outgoing = inherit()
    with socket.socket(fileno=connection) as to_engine:  # closed even if threads of the model's keep the process
        ModelHost(Channel(to_engine, (Arena(outgoing),), (Arena(incoming),))).run()


if __name__ == "__main__":
    main()
