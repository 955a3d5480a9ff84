"""Encoding of a cached answer: the parts of a result message, preceded by their lengths."""

import struct
from dataclasses import dataclass

from penstock.core.errors import WireError
from penstock.core.requests import InferRequest, InferResponse, Parameter, Timing
from penstock.core.tensors import Tensor
from penstock.wire import job_messages

FORMAT = 1
_HEAD = struct.Struct("<BI")  # the format and the number of parts; the length of each part follows


@dataclass(slots=True)
class CachedAnswer:
    """A block's answer without the fields that belong to one request."""

    outputs: list[Tensor]
    parameters: dict[str, Parameter]
    timing: Timing
    is_stored: bool  # the answer was read from the store

    def to_response(self, request: InferRequest, version: str) -> InferResponse:
        return InferResponse(
            request.model, version, request.request_id, list(self.outputs), self.timing, dict(self.parameters)
        )

    def to_hit_response(self, request: InferRequest, version: str) -> InferResponse:
        """Return the answer marked as a cache hit, with empty timing."""
        parameters = {**self.parameters, "cache": "hit"}
        return InferResponse(request.model, version, request.request_id, list(self.outputs), Timing(), parameters)

    def size_bytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.outputs)


def encode(answer: CachedAnswer) -> bytes:
    """Encode the answer. Its timing is reduced to the compute time, which a hit saves."""
    timing = Timing(compute_ns=answer.timing.compute_ns)
    parts = job_messages.encode_result(0, 0, answer.outputs, timing, answer.parameters)
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return b"".join((_HEAD.pack(FORMAT, len(parts)), lengths, *parts))


def decode(encoded: bytes) -> CachedAnswer:
    """Decode an answer, whose tensors are views of `encoded`. Raise WireError if `encoded` is damaged."""
    try:
        form, count = _HEAD.unpack_from(encoded)
        if form != FORMAT:
            raise WireError(f"the cached answer has format {form}, expected {FORMAT}")
        lengths = struct.unpack_from(f"<{count}Q", encoded, _HEAD.size)
    except struct.error as error:
        raise WireError("the cached answer is truncated") from error
    view, end = memoryview(encoded), _HEAD.size + 8 * count
    parts: job_messages.MessageParts = []
    for length in lengths:
        parts.append(view[end : end + length])
        end += length
    if end != len(encoded):
        raise WireError(f"the cached answer has {len(encoded)} bytes, but its header says {end}")
    kind, frame = job_messages.decode(parts)
    if kind != "result":
        raise WireError(f"expected a result as a cached answer, got a {kind} message")
    result = frame.result
    return CachedAnswer(
        job_messages.decode_tensors(result.outputs, parts),
        job_messages.decode_parameters(result.parameters),
        job_messages.decode_timing(result),
        True,
    )
