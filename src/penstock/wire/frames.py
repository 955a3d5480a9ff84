"""Job frames: a protobuf header and one raw frame per tensor; or several small jobs or results in one header."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from google.protobuf.message import DecodeError

from penstock.core.errors import PenstockError, WireError
from penstock.core.principals import ANYBODY, INFERRING, Principal
from penstock.core.requests import PLAIN, Controls, InferRequest, InferResponse, Parameter, SessionStep, Timing
from penstock.core.tensors import Buffer, Tensor
from penstock.pb.v1 import job_pb2 as pb
from penstock.wire import failures

PROTOCOL = 1
UNKNOWN_WORKER = "unknown_worker"  # of a Refused: what the peer has here is not known
Frames = list[Buffer]

# Tensors of a job or a result that are put into the header, with others of the same turn of the loop: copying them
# costs less than frames of their own.
TOGETHER_BYTES = 16 * 1024
# What one such message has at most.
MOST_BYTES = 256 * 1024
MOST_TOGETHER = 64
# Fewer than so many may wait for what the next turns of the loop bring: each message costs its receiver a turn, too.
FEW = 12


def encode(frame: pb.Frame) -> Frames:
    return [frame.SerializeToString()]


# On the hot path messages are filled in place: a constructor with keywords takes three times as long.


def encode_job(
    job_id: int,
    attempt: int,
    block_id: str,
    timeout_s: float,
    request: InferRequest,
    queue_timeout_s: float = inf,
    response_credits: int = 0,
) -> Frames:
    frame = pb.Frame()
    job = frame.job
    _fill_job(job, job_id, attempt, block_id, timeout_s, request, queue_timeout_s, response_credits)
    return _with_tensors(frame, job.inputs, request.inputs)


def add_job(
    jobs: Any,
    job_id: int,
    attempt: int,
    block_id: str,
    timeout_s: float,
    request: InferRequest,
    queue_timeout_s: float = inf,
    response_credits: int = 0,
) -> None:
    """To those of a Jobs, with its tensors inside. One that cannot be encoded is not there."""
    job = jobs.add()
    try:
        _fill_job(job, job_id, attempt, block_id, timeout_s, request, queue_timeout_s, response_credits)
        _put_tensors(job.inputs, request.inputs)
    except Exception:
        del jobs[-1]
        raise


def _fill_job(
    job: Any,
    job_id: int,
    attempt: int,
    block_id: str,
    timeout_s: float,
    request: InferRequest,
    queue_timeout_s: float,
    response_credits: int,
) -> None:
    job.attempt = attempt
    job.block_id = block_id
    _put_job(job, job_id, timeout_s, request)
    if request.controls is not PLAIN:
        _put_controls(job, request.controls, queue_timeout_s)
    if response_credits:
        job.response_credits = response_credits


def encode_forward(
    job_id: int, timeout_s: float, request: InferRequest, membership: int, response_credits: int = 0
) -> Frames:
    """The whole request, for another gateway, which reads its parameters anew."""
    frame = pb.Frame()
    forward = frame.forward
    forward.model = request.model
    forward.version = request.version
    forward.protocol = request.protocol
    forward.size_bytes = request.size_bytes
    forward.membership = membership
    forward.hops = 1
    if (principal := request.principal) is not ANYBODY:
        forward.caller.name, forward.caller.key_id = principal.name, principal.key_id
        forward.caller.models[:], forward.caller.blocks[:] = principal.models, principal.blocks
    _put_job(forward.job, job_id, timeout_s, request)
    forward.job.response_credits = response_credits
    return _with_tensors(frame, forward.job.inputs, request.inputs)


def forwarded(forward: pb.Forward, message: Sequence[Buffer]) -> InferRequest:
    job = forward.job
    return InferRequest(
        forward.model,
        tensors(job.inputs, message),
        forward.version,
        job.request_id,
        list(job.outputs),
        parameters(job.parameters),
        job.timeout_us / 1e6,
        job.traceparent,
        forward.protocol,
        size_bytes=forward.size_bytes,
        principal=_caller(forward.caller) if forward.HasField("caller") else ANYBODY,
    )


def _caller(caller: pb.Caller) -> Principal:
    return Principal(caller.name, caller.key_id, INFERRING, models=tuple(caller.models), blocks=tuple(caller.blocks))


def encode_result(
    job_id: int,
    attempt: int,
    outputs: Sequence[Tensor],
    timing: Timing,
    parameters: Mapping[str, Parameter] | None = None,
    is_partial: bool = False,
) -> Frames:
    frame = pb.Frame()
    result = frame.result
    _put_result(result, job_id, attempt, timing, parameters, is_partial)
    return _with_tensors(frame, result.outputs, outputs)


def add_result(
    results: Any,
    job_id: int,
    attempt: int,
    outputs: Sequence[Tensor],
    timing: Timing,
    parameters: Mapping[str, Parameter] | None = None,
    is_partial: bool = False,
) -> None:
    """To those of a Results, with its tensors inside. One that cannot be encoded is not there."""
    result = results.add()
    try:
        _put_result(result, job_id, attempt, timing, parameters, is_partial)
        _put_tensors(result.outputs, outputs)
    except Exception:
        del results[-1]
        raise


def add_failure(results: Any, job_id: int, attempt: int, error: PenstockError) -> None:
    results.add(job_id=job_id, attempt=attempt, failure=failures.encode_failure(error))


def _put_result(
    result: Any,
    job_id: int,
    attempt: int,
    timing: Timing,
    parameters: Mapping[str, Parameter] | None,
    is_partial: bool,
) -> None:
    result.job_id = job_id
    result.attempt = attempt
    result.queue_ns = timing.queue_ns
    result.batch_ns = timing.batch_ns
    result.compute_ns = timing.compute_ns
    result.finish_ns = timing.finish_ns
    result.batch_rows = timing.batch_rows
    if parameters:
        _put_parameters(result.parameters, parameters)
    if is_partial:
        result.is_partial = True


def encode_failure(job_id: int, attempt: int, error: PenstockError) -> Frames:
    return encode(pb.Frame(result=pb.Result(job_id=job_id, attempt=attempt, failure=failures.encode_failure(error))))


def encode_refused(error: PenstockError) -> Frames:
    """Its code says what to do, where that is known: an error's own is the same for all that is not understood."""
    return encode(pb.Frame(refused=pb.Refused(code=error.reason or error.code, message=error.message)))


def decode(frames: Sequence[Buffer]) -> tuple[str, pb.Frame]:
    """The kind of message and its header; raises WireError for anything that is not one."""
    if not frames:
        raise WireError("empty message: a protobuf Frame is expected first")
    try:
        frame = pb.Frame.FromString(bytes(frames[0]))
    except DecodeError as error:
        raise WireError("the first frame is not a penstock.v1.Frame") from error
    kind = frame.WhichOneof("kind")
    if kind is None:
        raise WireError("the frame is of no known kind: is the peer newer?")
    if kind == "job":
        expected = len(frame.job.inputs)
    elif kind == "result":
        expected = len(frame.result.outputs)
    elif kind == "forward":
        expected = len(frame.forward.job.inputs)
    else:
        expected = 0
    if len(frames) != expected + 1:
        raise WireError(f"a {kind} with {expected} tensors came with {len(frames) - 1} tensor frames")
    return kind, frame


def tensors(descriptors: Iterable[pb.TensorDescriptor], frames: Sequence[Buffer]) -> list[Tensor]:
    return [
        Tensor(descriptor.name, descriptor.datatype, tuple(descriptor.shape), data)
        for descriptor, data in zip(descriptors, frames[1:], strict=True)
    ]


def size_of(found: Sequence[Tensor]) -> int:
    return sum([len(tensor.data) for tensor in found])


def small_tensors(descriptors: Sequence[pb.TensorDescriptor]) -> list[Tensor]:
    """Of a job or a result that came with others."""
    # Slices are lists, whose ends no exception tells: that is half the time.
    return [Tensor(each.name, each.datatype, tuple(each.shape[:]), each.contents) for each in descriptors[:]]


def parameters(message: Mapping[str, pb.Parameter]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for name, parameter in message.items():
        kind = parameter.WhichOneof("value")
        if kind is not None:
            found[name] = getattr(parameter, kind)
    return found


def session(job: pb.Job) -> SessionStep | None:
    if not job.HasField("session"):
        return None
    found = job.session
    return SessionStep(
        found.session_id,
        found.seq_no or None,
        found.is_start,
        found.is_end,
        life=found.life,
        is_again=found.is_again,
    )


def timing(result: pb.Result) -> Timing:
    return Timing(result.queue_ns, result.batch_ns, result.compute_ns, result.finish_ns, result.batch_rows)


def response(result: pb.Result, message: Sequence[Buffer]) -> InferResponse:
    """Model, version and request id are left to the caller."""
    return _response(result, tensors(result.outputs, message))


def small_response(result: pb.Result) -> InferResponse:
    """Of one that came in Results."""
    return _response(result, small_tensors(result.outputs))


def _response(result: pb.Result, outputs: list[Tensor]) -> InferResponse:
    return InferResponse(
        "",
        "",
        "",
        outputs,
        timing(result),
        parameters(result.parameters) if result.parameters else {},
        not result.is_partial,
    )


def _put_job(job: Any, job_id: int, timeout_s: float, request: InferRequest) -> None:
    job.job_id = job_id
    job.timeout_us = max(1, int(timeout_s * 1e6))
    if request.outputs:
        job.outputs.extend(request.outputs)
    if request.request_id:
        job.request_id = request.request_id
    if request.traceparent:
        job.traceparent = request.traceparent
    if request.parameters:
        _put_parameters(job.parameters, request.parameters)


def _put_controls(job: Any, controls: Controls, queue_timeout_s: float) -> None:
    job.priority = controls.priority
    if queue_timeout_s < inf:
        job.queue_timeout_us = max(1, int(queue_timeout_s * 1e6))
    step = controls.session
    if step is not None:
        session = job.session
        session.session_id = step.session_id
        if step.is_ordered:
            session.seq_no = step.seq_no or 0
            session.is_start = step.is_start
            session.is_end = step.is_end
            session.life = step.life
            session.is_again = step.is_again


def _with_tensors(frame: pb.Frame, descriptors: Any, found: Iterable[Tensor]) -> Frames:
    data: Frames = []
    for tensor in found:
        descriptors.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        data.append(tensor.data)
    return [frame.SerializeToString(), *data]


def _put_tensors(descriptors: Any, found: Iterable[Tensor]) -> None:
    for tensor in found:
        each = descriptors.add()
        each.name = tensor.name
        each.datatype = tensor.datatype
        each.shape.extend(tensor.shape)
        each.contents = bytes(tensor.data)


def _put_parameters(target: Mapping[str, pb.Parameter], source: Mapping[str, Parameter]) -> None:
    for name, value in source.items():
        if isinstance(value, bool):
            target[name].bool_value = value
        elif isinstance(value, int):
            target[name].int64_value = value
        elif isinstance(value, float):
            target[name].double_value = value
        else:
            target[name].string_value = value


class FrameOutbox:
    """What one turn of the loop has for one peer, of one kind, goes out as one message at its end."""

    def __init__(self, kind: str, send: Callable[[Frames], object], patience: int = 0) -> None:
        """`kind`: jobs or results, which is also what that message's list is called. `patience`: so many turns more a
        few of them wait for others."""
        self._kind = kind
        self._send = send
        self._patience = patience
        self._turns_left = 0
        self._frame: pb.Frame | None = None
        self._list: Any = None
        self._size_bytes = 0

    def __len__(self) -> int:
        return 0 if self._frame is None else len(self._list)

    def room(self, size_bytes: int, most: int = MOST_TOGETHER) -> Any:
        """The list to add one to. What is full, or has as many as `most`, goes out first."""
        if self._frame is not None:
            self._size_bytes += size_bytes
            if self._size_bytes <= MOST_BYTES and len(self._list) < most:
                return self._list
            self.flush()
        self._frame = frame = pb.Frame()
        self._list = getattr(getattr(frame, self._kind), self._kind)
        self._size_bytes = size_bytes
        self._turns_left = self._patience
        asyncio.get_running_loop().call_soon(self._end_turn)
        return self._list

    def _end_turn(self) -> None:
        if self._turns_left and 0 < len(self) < FEW:
            self._turns_left -= 1
            asyncio.get_running_loop().call_soon(self._end_turn)
        else:
            self.flush()

    def flush(self) -> None:
        """At once, for what must not overtake it."""
        frame = self._frame
        if frame is not None:
            self._frame = None
            if self._list:
                self._send(encode(frame))

    def clear(self) -> None:
        """It is lost: the peer is gone, or has forgotten us."""
        self._frame = None
