"""Runs models that are Python classes; each instance runs in a process of its own."""

import atexit
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Any

import structlog

from penstock.core.errors import ConfigError, EngineFailed, PenstockError
from penstock.core.signature import Signature
from penstock.core.tensors import Array, Tensor, from_array, to_array
from penstock.engines.engine_options import PythonOptions
from penstock.engines.engine_protocols import CallContext, EngineSpec
from penstock.engines.hosting.process_supervisor import ProcessSupervisor
from penstock.engines.python.limit import limit_bytes
from penstock.engines.python.python_process import Program, PythonProcess
from penstock.engines.python.requirements import check_requirements
from penstock.wire.ipc.ipc_messages import Message

NO_CONTEXT = CallContext()
CONTEXT_FIELDS = tuple(field.name for field in fields(CallContext))
END_HANGING_S = 5.0  # time to end a process that hangs while it loads the model, and to read its traceback

log = structlog.get_logger()
now = time.monotonic


class PythonEngine:
    """Runs each instance in a process. All requests of a session go to one process, because it holds their state."""

    def __init__(
        self,
        spec: EngineSpec,
        options: PythonOptions,
        *,
        hang_s: float = 300.0,
        load_s: float = 300.0,
        close_s: float = 5.0,
    ) -> None:
        """`hang_s`: a process that takes longer to answer is killed. `close_s`: time for the model's `close` method."""
        self._spec = spec
        self._options = options
        self._hang_s, self._load_s, self._close_s = hang_s, load_s, close_s
        self._inputs = tuple(tensor.spec for tensor in options.inputs)
        self._outputs = tuple(tensor.spec for tensor in options.outputs)
        self._names = [output.name for output in self._outputs]
        memory_bytes = limit_bytes(options.memory_mb, spec.instances)
        programs = [Program(spec, options, index, memory_bytes) for index in range(spec.instances)]
        self._instances = [
            ProcessSupervisor(partial(PythonProcess, program), program.host.labels, load_s) for program in programs
        ]
        self._session_processes: dict[str, PythonProcess] = {}  # the process of each session
        self._close_deadline = 0.0  # 0: not closing

    def load(self) -> Signature:
        check_requirements(self._spec.file)
        atexit.register(self.close)  # close the models even if the worker exits early
        deadline = now() + self._load_s + END_HANGING_S
        for instance in self._instances:
            instance.start()
        for instance in self._instances:
            if problem := instance.wait_loaded(deadline):
                self.close()
                raise ConfigError(
                    f"{self._spec.file}: cannot be loaded: {problem}", file=str(self._spec.file), reason="python_load"
                )
        return Signature(self._inputs, self._outputs, "python", "custom")

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        """Do nothing, because a model prepares itself in its constructor."""

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        return self.infer_with(instance, inputs, outputs, NO_CONTEXT)

    def infer_with(
        self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str], context: CallContext
    ) -> list[Array]:
        if self._options.is_decoupled:
            return _single_answer(self.stream(instance, inputs, outputs, context))
        process = self._process_for(instance, context)
        reply = process.call("infer", _context_fields(context), self._hang_s, _to_tensors(inputs))
        return self._select_arrays(reply, outputs)

    def stream(
        self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str], context: CallContext
    ) -> Generator[list[Array], None, None]:
        if not self._options.is_decoupled:
            yield self.infer_with(instance, inputs, outputs, context)
            return
        process = self._process_for(instance, context)
        reply = process.call("stream", _context_fields(context), self._hang_s, _to_tensors(inputs))
        try:
            while reply.kind == "answer":
                yield self._select_arrays(reply, outputs)
                reply = process.call("next", {"stream": reply.fields["stream"]}, self._hang_s)
        except GeneratorExit:
            self._call_and_log(process, "close", {"stream": reply.fields["stream"]}, "close_stream_failed")
            raise

    def end_session(self, session_id: str, reason: str) -> None:
        process = self._session_processes.pop(session_id, None)
        if process is None or process.end:
            return
        self._call_and_log(process, "end_session", {"session_id": session_id, "reason": reason}, "end_session_failed")

    def probe(self, instance: int) -> str:
        """Return why the instance's process does not work, or an empty text. The model's code is not called."""
        return self._instances[instance].problem()

    def close(self) -> None:
        """Abort running requests, and end the processes.

        A second call, when Python exits, has the deadline of the first call.
        """
        self._close_deadline = self._close_deadline or now() + self._close_s
        for instance in self._instances:
            instance.request_stop()
        for instance in self._instances:
            instance.end(self._close_deadline)
        self._session_processes.clear()
        atexit.unregister(self.close)

    def _process_for(self, instance: int, context: CallContext) -> PythonProcess:
        session_id = context.session_id
        if not session_id:
            return self._instances[instance].process()
        home = self._session_processes.get(session_id)
        if home is not None and not home.end:
            return home
        if home is not None and not context.is_start:
            raise EngineFailed(
                f"session '{session_id}': its state was lost when the model's process ended ({home.end}); "
                "start a new session"
            )
        self._session_processes[session_id] = process = self._instances[instance].process()
        return process

    def _call_and_log(self, process: PythonProcess, kind: str, fields: dict[str, str], event: str) -> None:
        """Send a process a message and ignore its answer; log a failure under the name `event`."""
        try:
            process.call(kind, fields, self._hang_s)
        except PenstockError as error:
            log.warning(event, file=str(self._spec.file), reason=error.message)

    def _select_arrays(self, reply: Message, outputs: Sequence[str]) -> list[Array]:
        found = {tensor.name: tensor for tensor in reply.tensors}
        return [to_array(found[name]) for name in outputs or self._names]


def _single_answer(answers: Generator[list[Array], None, None]) -> list[Array]:
    with closing(answers):
        found = list(islice(answers, 2))
    if len(found) != 1:
        many = "more than one answer" if found else "no answer"
        raise EngineFailed(f"the model is decoupled and gave {many}; use a streaming request")
    return found[0]


def _context_fields(context: CallContext) -> dict[str, Any]:
    return {"context": {name: getattr(context, name) for name in CONTEXT_FIELDS}}


def _to_tensors(inputs: Mapping[str, Array]) -> list[Tensor]:
    return [from_array(name, array) for name, array in inputs.items()]
