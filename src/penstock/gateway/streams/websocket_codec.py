"""The codec of WebSockets: REST's JSON as text, with tensors behind it as binary, to and from the request."""

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.tensors import BYTES, Tensor, pack_bytes, unpack_bytes
from penstock.gateway import statuses
from penstock.gateway.http.oip.codec import LIMITS, OutputForm, decode_infer, encode_infer
from penstock.gateway.large import LARGE_BYTES
from penstock.gateway.shared_memory.regions import SharedMemory


class Utf8(bytes):
    """Text that stays as it travels: a string may take four times the bytes, and JSON is read from bytes anyway."""

    __slots__ = ()

    def encode(self) -> bytes:  # what uvicorn asks of a text that is to be sent
        return self

    def decode(self, *_: object) -> "Utf8":  # type: ignore[override]  # and of one that has come
        return self


Message = Utf8 | bytes
# Before the JSON of a binary message: its length, little-endian.
LENGTH_BYTES = 4
MAX_ID = 256  # characters of an id that could not be read with the rest of its message


def json_bytes(message: Message) -> int:
    """How much of a message is JSON, as it says itself."""
    return len(message) if isinstance(message, Utf8) else int.from_bytes(message[:LENGTH_BYTES], "little")


def decode_message(
    message: Message, memory: SharedMemory | None = None, limits: Limits = LIMITS
) -> tuple[InferRequest, OutputForm]:
    """The request, whose model, version and protocol the caller fills in, and how to answer it."""
    if isinstance(message, Utf8):
        return decode_infer(memoryview(message), memory=memory, limits=limits)
    header, tensors = split(message)
    request, form = decode_infer(header, tensors, memory, limits)
    form.is_binary = True  # who sends binary wants binary, unless an output says otherwise
    return request, form


def split(message: bytes) -> tuple[memoryview, memoryview]:
    """The JSON of a binary message, and the tensors behind it."""
    view = memoryview(message)
    end = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    if len(view) < LENGTH_BYTES or end > len(view):
        raise InvalidRequest(
            f"a binary message begins with the length of its JSON, as {LENGTH_BYTES} bytes, little-endian; "
            f"this one has {len(view)} bytes in all"
        )
    return view[LENGTH_BYTES:end], view[end:]


def encode_answer(
    response: InferResponse, request: InferRequest, form: OutputForm, is_text: bool, limits: Limits = LIMITS
) -> Message:
    """Text for text, unless the request wants binary outputs; binary for binary."""
    body, header_length = encode_infer(response, request.parameters, form, limits)
    if is_text and header_length is None:
        return Utf8(body)
    length = len(body) if header_length is None else header_length
    return b"".join([length.to_bytes(LENGTH_BYTES, "little"), body])


def encode_error(error: PenstockError, request_id: str) -> Utf8:
    told = {"error": statuses.told(error), "code": error.code, "id": request_id, **statuses.details(error)}
    return Utf8(orjson.dumps(told))


def find_id(message: Message) -> str:
    """The id of a message that is wrong otherwise, if there is one to be found; what is large is not looked through."""
    if json_bytes(message) > LARGE_BYTES:
        return ""
    try:
        found = orjson.loads(memoryview(message) if isinstance(message, Utf8) else split(message)[0])["id"]
    except (ValueError, KeyError, TypeError, InvalidRequest):
        return ""
    return found if isinstance(found, str) and len(found) <= MAX_ID else ""


@dataclass(frozen=True, slots=True)
class RawForm:
    """Messages that are one element of one input, and answers that are one output, with nothing around them."""

    input: str
    output: str

    def check(self, block: BlockDescription) -> None:
        """Raises where the model has no such input or output."""
        inputs = [spec.name for spec in block.inputs if spec.datatype == BYTES]
        outputs = [spec.name for spec in block.outputs]
        if self.input not in inputs:
            raise InvalidRequest(
                f"model '{block.model}' has no BYTES input '{self.input[:80]}'; it has: {_names(inputs)}"
            )
        if self.output not in outputs:
            raise InvalidRequest(f"model '{block.model}' has no output '{self.output[:80]}'; it has: {_names(outputs)}")

    def decode(self, message: Message, rank: int) -> InferRequest:
        tensor = Tensor(self.input, BYTES, (1,) * rank, pack_bytes([message]))
        return InferRequest("", [tensor], outputs=[self.output], size_bytes=len(tensor.data))

    def encode(self, response: InferResponse) -> bytes:
        """The first element of BYTES; all bytes of other datatypes."""
        for tensor in response.outputs:
            if tensor.name == self.output:
                if tensor.datatype != BYTES:
                    return bytes(tensor.data)
                elements = unpack_bytes(tensor)
                return elements[0] if elements else b""
        raise InvalidRequest(f"model '{response.model}' gave no output '{self.output}'")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
