"""Job messages: a protobuf header and one raw part per tensor, or a header with several small jobs or results."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from google.protobuf.message import DecodeError

from penstock.core.errors import PenstockError, WireError
from penstock.core.principals import ANYBODY, INFERENCE_SCOPES, Principal
from penstock.core.requests import NO_CONTROLS, Controls, InferRequest, InferResponse, Parameter, SessionStep, Timing
from penstock.core.tensors import Buffer, Tensor
from penstock.pb.v1 import job_pb2 as pb
from penstock.wire import failures

PROTOCOL = 1
UNKNOWN_WORKER = "unknown_worker"  # code of a Refused message: the gateway knows neither the worker nor its jobs
MessageParts = list[Buffer]

# A job or result up to this size is combined with others of the same turn of the event loop, with its tensors in the
# header, because copying them costs less than sending separate parts.
MAX_COMBINED_ENTRY_BYTES = 16 * 1024
# The limits of one combined message.
MAX_COMBINED_MESSAGE_BYTES = 256 * 1024
MAX_COMBINED_ENTRIES = 64
# Fewer jobs or results than this may wait for more in the loop's next turns, because each message costs its receiver
# a turn.
MIN_IMMEDIATE_ENTRIES = 12


def encode(header: pb.Header) -> MessageParts:
    return [header.SerializeToString()]


# On the hot path messages are filled in place: a constructor with keyword arguments takes three times as long.


def encode_job(
    job_id: int,
    attempt: int,
    block_id: str,
    timeout_s: float,
    request: InferRequest,
    queue_timeout_s: float = inf,
    response_credits: int = 0,
) -> MessageParts:
    header = pb.Header()
    job = header.job
    _fill_job(job, job_id, attempt, block_id, timeout_s, request, queue_timeout_s, response_credits)
    return _join_tensors(header, job.inputs, request.inputs)


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
    """Append a job with its tensors to a Jobs message's list. If encoding fails, the list stays unchanged."""
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
    if request.controls is not NO_CONTROLS:
        _put_controls(job, request.controls, queue_timeout_s)
    if response_credits:
        job.response_credits = response_credits


def encode_forward(
    job_id: int, timeout_s: float, request: InferRequest, membership: int, response_credits: int = 0
) -> MessageParts:
    """Return a message that forwards the whole request to another gateway. That gateway parses the parameters again."""
    header = pb.Header()
    forward = header.forward
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
    return _join_tensors(header, forward.job.inputs, request.inputs)


def decode_forward(forward: pb.Forward, message: Sequence[Buffer]) -> InferRequest:
    job = forward.job
    return InferRequest(
        forward.model,
        decode_tensors(job.inputs, message),
        forward.version,
        job.request_id,
        list(job.outputs),
        decode_parameters(job.parameters),
        job.timeout_us / 1e6,
        job.traceparent,
        forward.protocol,
        size_bytes=forward.size_bytes,
        principal=_decode_caller(forward.caller) if forward.HasField("caller") else ANYBODY,
    )


def _decode_caller(caller: pb.Caller) -> Principal:
    return Principal(
        caller.name, caller.key_id, INFERENCE_SCOPES, models=tuple(caller.models), blocks=tuple(caller.blocks)
    )


def encode_result(
    job_id: int,
    attempt: int,
    outputs: Sequence[Tensor],
    timing: Timing,
    parameters: Mapping[str, Parameter] | None = None,
    is_partial: bool = False,
) -> MessageParts:
    header = pb.Header()
    result = header.result
    _put_result(result, job_id, attempt, timing, parameters, is_partial)
    return _join_tensors(header, result.outputs, outputs)


def add_result(
    results: Any,
    job_id: int,
    attempt: int,
    outputs: Sequence[Tensor],
    timing: Timing,
    parameters: Mapping[str, Parameter] | None = None,
    is_partial: bool = False,
) -> None:
    """Append a result with its tensors to a Results message's list. If encoding fails, the list stays unchanged."""
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


def encode_failure(job_id: int, attempt: int, error: PenstockError) -> MessageParts:
    return encode(pb.Header(result=pb.Result(job_id=job_id, attempt=attempt, failure=failures.encode_failure(error))))


def encode_refused(error: PenstockError) -> MessageParts:
    """Return a Refused message whose code is the error's `reason`, or the error's code for an empty reason."""
    return encode(pb.Header(refused=pb.Refused(code=error.reason or error.code, message=error.message)))


def decode(message: Sequence[Buffer]) -> tuple[str, pb.Header]:
    """Return the kind of a message and its header. Raises WireError if the message is invalid."""
    if not message:
        raise WireError("empty message: its first part must be a penstock.v1.Header")
    try:
        header = pb.Header.FromString(bytes(message[0]))
    except DecodeError as error:
        raise WireError("the first part of the message is not a penstock.v1.Header") from error
    kind = header.WhichOneof("kind")
    if kind is None:
        raise WireError("unknown kind of message; run the same version of Penstock everywhere")
    if kind == "job":
        expected = len(header.job.inputs)
    elif kind == "result":
        expected = len(header.result.outputs)
    elif kind == "forward":
        expected = len(header.forward.job.inputs)
    else:
        expected = 0
    if len(message) != expected + 1:
        raise WireError(f"a {kind} with {expected} tensors came with {len(message) - 1} tensor parts")
    return kind, header


def decode_tensors(descriptors: Iterable[pb.TensorDescriptor], message: Sequence[Buffer]) -> list[Tensor]:
    """Return the tensors of a message: the first part is the header, and each further part is a tensor's bytes."""
    return [
        Tensor(descriptor.name, descriptor.datatype, tuple(descriptor.shape), data)
        for descriptor, data in zip(descriptors, message[1:], strict=True)
    ]


def count_bytes(tensors: Sequence[Tensor]) -> int:
    return sum([len(tensor.data) for tensor in tensors])


def decode_small_tensors(descriptors: Sequence[pb.TensorDescriptor]) -> list[Tensor]:
    """Return the tensors of a small job or result, whose tensors are in the message's header."""
    # The slice is a list. Iterating over it takes half the time, because protobuf's iterator ends with an exception.
    return [Tensor(each.name, each.datatype, tuple(each.shape[:]), each.contents) for each in descriptors[:]]


def decode_parameters(message: Mapping[str, pb.Parameter]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for name, parameter in message.items():
        kind = parameter.WhichOneof("value")
        if kind is not None:
            found[name] = getattr(parameter, kind)
    return found


def decode_session(job: pb.Job) -> SessionStep | None:
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


def decode_timing(result: pb.Result) -> Timing:
    return Timing(result.queue_ns, result.batch_ns, result.compute_ns, result.finish_ns, result.batch_rows)


def decode_response(result: pb.Result, message: Sequence[Buffer]) -> InferResponse:
    """Return a Result message as a response. The caller sets the response's model, version and request id."""
    return _make_response(result, decode_tensors(result.outputs, message))


def decode_small_response(result: pb.Result) -> InferResponse:
    """Return one result of a Results message as a response. The caller sets the model, version and request id."""
    return _make_response(result, decode_small_tensors(result.outputs))


def _make_response(result: pb.Result, outputs: list[Tensor]) -> InferResponse:
    return InferResponse(
        "",
        "",
        "",
        outputs,
        decode_timing(result),
        decode_parameters(result.parameters) if result.parameters else {},
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


def _join_tensors(header: pb.Header, descriptors: Any, tensors: Iterable[Tensor]) -> MessageParts:
    data: MessageParts = []
    for tensor in tensors:
        descriptors.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        data.append(tensor.data)
    return [header.SerializeToString(), *data]


def _put_tensors(descriptors: Any, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
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


class MessageOutbox:
    """Collects small jobs or results for one peer into one message, and sends it at the end of the loop's turn."""

    def __init__(self, kind: str, send: Callable[[MessageParts], object], extra_turns: int = 0) -> None:
        """`kind` is "jobs" or "results". A message with few entries waits `extra_turns` more turns for others."""
        self._kind = kind
        self._send = send
        self._extra_turns = extra_turns
        self._turns_left = 0
        self._header: pb.Header | None = None
        self._list: Any = None
        self._size_bytes = 0

    def __len__(self) -> int:
        return 0 if self._header is None else len(self._list)

    def list_for(self, size_bytes: int, max_entries: int = MAX_COMBINED_ENTRIES) -> Any:
        """Return the list to which the caller must append a job or result of this size.

        If the current message would be too large, or has `max_entries` entries, send it and start a new message.
        """
        if self._header is not None:
            self._size_bytes += size_bytes
            if self._size_bytes <= MAX_COMBINED_MESSAGE_BYTES and len(self._list) < max_entries:
                return self._list
            self.flush()
        self._header = header = pb.Header()
        self._list = getattr(getattr(header, self._kind), self._kind)
        self._size_bytes = size_bytes
        self._turns_left = self._extra_turns
        asyncio.get_running_loop().call_soon(self._end_turn)
        return self._list

    def _end_turn(self) -> None:
        if self._turns_left and 0 < len(self) < MIN_IMMEDIATE_ENTRIES:
            self._turns_left -= 1
            asyncio.get_running_loop().call_soon(self._end_turn)
        else:
            self.flush()

    def flush(self) -> None:
        """Send the collected message now, so that the peer receives it before messages that are sent later."""
        header = self._header
        if header is not None:
            self._header = None
            if self._list:
                self._send(encode(header))

    def clear(self) -> None:
        """Drop the collected message, because the peer has left or has lost its state."""
        self._header = None
