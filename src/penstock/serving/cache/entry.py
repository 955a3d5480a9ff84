"""A cached answer as bytes: a result's frames, with their lengths before them."""

import struct
from dataclasses import dataclass

from penstock.core.errors import WireError
from penstock.core.requests import InferRequest, InferResponse, Parameter, Timing
from penstock.core.tensors import Tensor
from penstock.wire import frames

FORMAT = 1
_HEAD = struct.Struct("<BI")  # the format, the number of frames; then the length of each


@dataclass(slots=True)
class CachedAnswer:
    """What a block answered, whoever asked."""

    outputs: list[Tensor]
    parameters: dict[str, Parameter]
    timing: Timing
    is_kept: bool  # it comes from the store

    def to(self, request: InferRequest, version: str) -> InferResponse:
        return InferResponse(
            request.model, version, request.request_id, list(self.outputs), self.timing, dict(self.parameters)
        )

    def as_hit(self, request: InferRequest, version: str) -> InferResponse:
        """Marked as a hit; its timing is empty, for nothing ran."""
        parameters = {**self.parameters, "cache": "hit"}
        return InferResponse(request.model, version, request.request_id, list(self.outputs), Timing(), parameters)

    def size_bytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.outputs)


def encode(answer: CachedAnswer) -> bytes:
    """Keeps only the model's own time, which a hit saves."""
    timing = Timing(compute_ns=answer.timing.compute_ns)
    parts = frames.encode_result(0, 0, answer.outputs, timing, answer.parameters)
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return b"".join((_HEAD.pack(FORMAT, len(parts)), lengths, *parts))


def decode(kept: bytes) -> CachedAnswer:
    """The answer's tensors are views of `kept`. Raises WireError for what is no answer, or one of another format."""
    try:
        form, count = _HEAD.unpack_from(kept)
        if form != FORMAT:
            raise WireError(f"a cached answer of format {form}: this is format {FORMAT}")
        lengths = struct.unpack_from(f"<{count}Q", kept, _HEAD.size)
    except struct.error as error:
        raise WireError("a cached answer is cut short") from error
    view, end = memoryview(kept), _HEAD.size + 8 * count
    parts: frames.Frames = []
    for length in lengths:
        parts.append(view[end : end + length])
        end += length
    if end != len(kept):
        raise WireError(f"a cached answer of {len(kept)} bytes says that it has {end}")
    kind, frame = frames.decode(parts)
    if kind != "result":
        raise WireError(f"a cached answer is a {kind}")
    result = frame.result
    return CachedAnswer(
        frames.tensors(result.outputs, parts), frames.parameters(result.parameters), frames.timing(result), True
    )
