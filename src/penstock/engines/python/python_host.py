"""The program of a Python model's process: loads the model, then answers the engine's messages one at a time.

    python -m penstock.engines.python.python_host <socket> <memory in> <memory out> <the engine's process id>

This module and its imports do not import the worker, so that the process contains little besides the model's code.
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
from penstock.core.packets import pack_answer, unpack_packet
from penstock.core.tensors import TensorSpec, to_array
from penstock.engines.hosting.host_startup import take_over_descriptors
from penstock.engines.out_of_memory import as_out_of_memory
from penstock.engines.python import python_model
from penstock.engines.python.limit import MIB, is_out_of_memory, set_limit, widen_limit
from penstock.engines.python.python_model import (
    ModelContext,
    RequestContext,
    describe,
    iterate_answers,
    load_model,
    to_tensors,
)
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.ipc_channel import IpcChannel, PeerGone
from penstock.wire.ipc.ipc_messages import Message

_OWN_FILES = (__file__, python_model.__file__)


class ModelHost:
    """Loads a model, and answers the engine's messages with it; keeps the model's sessions and streams."""

    def __init__(self, channel: IpcChannel) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._limit: int | None = None  # of its memory, in bytes
        self._wide_limit: tuple[int, int] | None = None
        self._model: Any = None
        self._takes_packets = False
        self._outputs: tuple[TensorSpec, ...] = ()
        self._sessions: dict[str, dict[Any, Any]] = {}
        self._streams: dict[int, Iterator[object]] = {}
        self._handlers: Mapping[str, Callable[[Message], Message]] = {
            "load": self._load_model,
            "infer": self._infer,
            "stream": self._open_stream,
            "next": lambda message: self._next_answer(message.fields["stream"]),
            "close": self._close,
            "end_session": self._end_session,
            "ping": lambda message: Message("pong"),
        }

    def run(self) -> None:
        """Answer messages until the engine sends "stop" or closes the connection."""
        try:
            while (message := self._receive()).kind != "stop":
                reply = self._answer(message)
                if os.getpid() != self._pid:
                    os._exit(1)  # a child that the model forked must not answer
                reply.fields["call"] = message.fields["call"]
                self._channel.send(reply)
        except PeerGone:
            return
        self._close_model()

    def _receive(self) -> Message:
        try:
            return self._channel.receive()
        except MemoryError:
            self._widen_limit()
            sys.stderr.write(f"the tensors of a request do not fit into the model's memory{self._memory_advice()}\n")
            os._exit(1)

    def _answer(self, message: Message) -> Message:
        try:
            return self._handlers[message.kind](message)
        except (EngineFailed, InvalidRequest) as error:
            return _failed_message(error.code, error.message, str(error.reason))
        except (SystemExit, KeyboardInterrupt):
            raise
        except MemoryError as error:
            return self._out_of_memory_message(error)
        except BaseException as error:  # noqa: BLE001 - the model's error is sent to the caller
            if is_out_of_memory(error):
                return self._out_of_memory_message(error)
            lacks_device = "cuda" in str(error).lower() and as_out_of_memory(error, "the GPU") is not None
            kind = DeviceOutOfMemory if lacks_device else EngineFailed
            return _failed_message(kind.code, f"the model failed: {describe(error, _OWN_FILES)}")

    def _out_of_memory_message(self, error: BaseException) -> Message:
        """Return an answer that reports a lack of memory; the engine ends this process after reading the answer."""
        self._widen_limit()
        reply = _failed_message(
            EngineFailed.code, f"the model ran out of memory{self._memory_advice()}: {describe(error, _OWN_FILES)}"
        )
        reply.fields["is_out_of_memory"] = True
        return reply

    def _widen_limit(self) -> None:
        """Raise this process's memory limit a little, so that it can still send an answer and write the log."""
        if self._wide_limit:
            widen_limit(self._wide_limit)

    def _memory_advice(self) -> str:
        if not self._limit:
            return ""
        return f" ({self._limit // MIB} MiB: raise python.memory_mb, or look for a memory leak in the model)"

    def _load_model(self, message: Message) -> Message:
        fields = message.fields
        self._limit = fields["memory_bytes"]
        if self._limit:
            self._wide_limit = set_limit(self._limit)
        file = Path(fields["file"])
        self._outputs = tuple(TensorSpec(name, datatype, tuple(shape)) for name, datatype, shape in fields["outputs"])
        context = ModelContext(folder=file.parent, **fields["context"])
        self._takes_packets = fields["takes_packets"]
        self._model = load_model(file, fields["is_decoupled"], context)
        return Message("loaded")

    def _infer(self, message: Message) -> Message:
        context = self._begin_request(message)
        if self._takes_packets:
            answer: object = pack_answer(self._model.infer(unpack_packet(_to_arrays(message)), context))
        else:
            answer = self._model.infer(_to_arrays(message), context)
        return Message("answer", tensors=to_tensors(answer, self._outputs))

    def _open_stream(self, message: Message) -> Message:
        number = message.fields["call"]
        context = self._begin_request(message)
        self._streams[number] = iterate_answers(self._model.infer(_to_arrays(message), context))
        return self._next_answer(number)

    def _next_answer(self, number: int) -> Message:
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

    def _begin_request(self, message: Message) -> RequestContext:
        context = RequestContext(**message.fields["context"])
        session_id = context.session_id
        if not session_id:
            return context
        if context.is_start:
            self._drop_session(session_id, "restarted")
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
        except Exception:  # noqa: BLE001 - the session ends anyway; the traceback goes to the log
            traceback.print_exc()

    def _call_hook(self, name: str, *arguments: str) -> None:
        hook = getattr(self._model, name, None)
        if hook is not None:
            hook(*arguments)

    def _close_model(self) -> None:
        for answers in self._streams.values():
            try:
                _close(answers)
            except Exception:  # noqa: BLE001 - the model must still be closed
                traceback.print_exc()
        self._call_hook("close")


def _to_arrays(message: Message) -> dict[str, Any]:
    return {tensor.name: to_array(tensor) for tensor in message.tensors}


def _close(answers: Iterator[object]) -> None:
    close = getattr(answers, "close", None)
    if close is not None:
        close()


def _failed_message(code: str, text: str, reason: str = "") -> Message:
    # Lone surrogates, which file names may contain, cannot be sent.
    text = shorten(text.encode("utf-8", "backslashreplace").decode())
    return Message("failed", {"code": code, "message": text, "reason": reason})


def main() -> None:
    connection, incoming, outgoing = take_over_descriptors()
    with socket.socket(fileno=connection) as to_engine:  # closed even if the model's threads keep the process alive
        ModelHost(IpcChannel(to_engine, (Arena(outgoing),), (Arena(incoming),))).run()


if __name__ == "__main__":
    main()
