"""The codec of WebSockets: REST's JSON as a text message, or JSON and binary tensors as a binary message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.requests import InferRequest, InferResponse, Parameter
from penstock.core.tensors import BYTES, Tensor, pack_bytes, unpack_bytes
from penstock.endpoints import statuses
from penstock.endpoints.http.websocket_protocol import Utf8
from penstock.endpoints.large_messages import LARGE_BYTES
from penstock.gateway.oip.rest_codec import LIMITS, OutputForm, decode_infer, encode_infer
from penstock.gateway.shared_memory.regions import SharedMemory

Message = Utf8 | bytes
# A binary message starts with the length of its JSON, little-endian.
LENGTH_BYTES = 4
MAX_ID = 256  # characters of the id of an invalid message


def count_json_bytes(message: Message) -> int:
    """Return the length in bytes of a message's JSON. A binary message states this length in its first bytes."""
    return len(message) if isinstance(message, Utf8) else int.from_bytes(message[:LENGTH_BYTES], "little")


def decode_message(
    message: Message, memory: SharedMemory | None = None, limits: Limits = LIMITS
) -> tuple[InferRequest, OutputForm]:
    """Return the request and the form of its answer. The caller sets the request's model, version and protocol."""
    if isinstance(message, Utf8):
        return decode_infer(memoryview(message), memory=memory, limits=limits)
    header, tensors = split_message(message)
    request, form = decode_infer(header, tensors, memory, limits)
    form.is_binary = True  # a binary request has a binary answer, unless an output requests otherwise
    return request, form


def split_message(message: bytes) -> tuple[memoryview, memoryview]:
    """Return the JSON of a binary message, and the tensors after it."""
    view = memoryview(message)
    end = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    if len(view) < LENGTH_BYTES or end > len(view):
        raise InvalidRequest(
            f"a binary message must start with the length of its JSON as {LENGTH_BYTES} bytes, little-endian; "
            f"this message has {len(view)} bytes"
        )
    return view[LENGTH_BYTES:end], view[end:]


def encode_answer(
    response: InferResponse, request: InferRequest, form: OutputForm, is_text: bool, limits: Limits = LIMITS
) -> Message:
    """Return an answer as text if the request was text and no output is binary, otherwise as a binary message."""
    body, header_length = encode_infer(response, request.parameters, form, limits)
    if is_text and header_length is None:
        return Utf8(body)
    length = len(body) if header_length is None else header_length
    return b"".join([length.to_bytes(LENGTH_BYTES, "little"), body])


def encode_error(error: PenstockError, request_id: str) -> Utf8:
    content = {
        "error": statuses.make_public_message(error),
        "code": error.code,
        "id": request_id,
        **statuses.make_details(error),
    }
    return Utf8(orjson.dumps(content))


def find_id(message: Message) -> str:
    """Return the id of an invalid message, or an empty string if it has none or is large."""
    if count_json_bytes(message) > LARGE_BYTES:
        return ""
    try:
        found = orjson.loads(memoryview(message) if isinstance(message, Utf8) else split_message(message)[0])["id"]
    except (ValueError, KeyError, TypeError, InvalidRequest):
        return ""
    return found if isinstance(found, str) and len(found) <= MAX_ID else ""


@dataclass(frozen=True, slots=True)
class RawForm:
    """The form of raw messages: a message is one element of one input, and an answer is the bytes of one output."""

    input: str
    output: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)  # of every request

    def check(self, block: BlockDescription) -> None:
        """Raise InvalidRequest if the model has no such input or output."""
        inputs = [spec.name for spec in block.inputs if spec.datatype == BYTES]
        outputs = [spec.name for spec in block.outputs]
        if self.input not in inputs:
            raise InvalidRequest(
                f"model '{block.model}' has no BYTES input '{self.input[:80]}'; it has: {_join_names(inputs)}"
            )
        if self.output not in outputs:
            raise InvalidRequest(
                f"model '{block.model}' has no output '{self.output[:80]}'; it has: {_join_names(outputs)}"
            )

    def decode(self, message: Message, rank: int) -> InferRequest:
        tensor = Tensor(self.input, BYTES, (1,) * rank, pack_bytes([message]))
        return InferRequest(
            "",
            [tensor],
            outputs=[self.output],
            parameters=dict(self.parameters),
            size_bytes=len(tensor.data),
        )

    def encode(self, response: InferResponse) -> bytes:
        """Return the first element of a BYTES output, or all bytes of another datatype."""
        for tensor in response.outputs:
            if tensor.name == self.output:
                if tensor.datatype != BYTES:
                    return bytes(tensor.data)
                elements = unpack_bytes(tensor)
                return elements[0] if elements else b""
        raise InvalidRequest(f"model '{response.model}' returned no output '{self.output}'")


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
