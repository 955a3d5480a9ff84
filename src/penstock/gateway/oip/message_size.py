"""Count the fields and elements of a large gRPC message before it is parsed, by its tags and lengths."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, RequestTooLarge

# For names, shapes and parameters; the bytes of tensors are limited separately.
ENVELOPE_BYTES = 1024 * 1024
PIECE_BYTES = 1024 * 1024
# Wire types of protobuf. None of the messages has groups (3 and 4).
VARINT, BYTES = 0, 2
FIXED_BYTES = {1: 8, 5: 4}
# Fields of ModelInferRequest, and of its InferInputTensor.
PARAMETERS, INPUTS, OUTPUTS, RAW = 4, 5, 6, 7
CONTENTS = 5
MAX_FIELDS_PER_TENSOR = 16  # including parameters and raw bytes; far more than any tensor has
# Fields of InferTensorContents: numbers of a fixed size, and byte strings. The others are packed varints.
ITEM_BYTES = {6: 4, 7: 8}
TEXTS = 8
SHORT_TEXT = TEXTS << 3 | BYTES  # the tag before the length of a text
MAX_CONTENTS_FIELDS = 1024 * 1024  # limit for all typed contents; short texts at their start are not counted
MESSAGE_NAME = "an inference.ModelInferRequest"
COUNTED_FIELDS = {PARAMETERS: "parameters", INPUTS: "inputs", OUTPUTS: "outputs", RAW: "raw_input_contents"}


@dataclass(slots=True)
class TypedMessage:
    """An unparsed message whose typed contents are large. `spans`: the positions of these contents."""

    data: bytes
    spans: list[tuple[int, int]]

    def take(self) -> bytes:
        """Return the data, and drop the reference here, so that the memory is freed while the request is served."""
        data, self.data = self.data, b""
        return data


def find_contents(data: bytes, limits: Limits) -> list[tuple[int, int]]:
    """Return the spans of a ModelInferRequest's typed contents.

    Raise RequestTooLarge if the message has too many fields, or too many bytes besides its tensors.
    """
    spans: list[tuple[int, int]] = []
    counts = dict.fromkeys(COUNTED_FIELDS, 0)
    other_bytes = len(data)
    walk = FieldWalk(data, MAX_FIELDS_PER_TENSOR * limits.max_tensors + limits.max_parameters)
    for field, kind, start, end in walk.fields(0, len(data)):
        if field not in counts or kind != BYTES:
            continue
        counts[field] += 1
        what = COUNTED_FIELDS[field]
        most = limits.max_parameters if field == PARAMETERS else limits.max_tensors
        if counts[field] > most:
            raise RequestTooLarge(f"the request has more than {most} {what}: send fewer")
        if field == RAW:
            other_bytes -= end - start
        elif field == INPUTS:
            found = [
                (first, last)
                for number, form, first, last in walk.fields(start, end)
                if number == CONTENTS and form == BYTES
            ]
            other_bytes -= sum(last - first for first, last in found)
            spans += found
    if other_bytes > ENVELOPE_BYTES:
        raise RequestTooLarge(
            f"the request has {other_bytes} bytes besides its tensors, over the limit of {ENVELOPE_BYTES}: "
            f"send shorter names and parameters"
        )
    return spans


def check_contents(message: TypedMessage, limits: Limits) -> None:
    """Raise RequestTooLarge if the typed contents have too many elements."""
    data, left = message.data, limits.max_values
    walk = FieldWalk(data, MAX_CONTENTS_FIELDS)
    for start, end in message.spans:
        start, left = _skip_texts(data, start, end, left)
        for field, kind, first, last in walk.fields(start, end):
            left -= 1 if kind != BYTES or field == TEXTS else _count_packed(data, field, first, last)
            if left < 0:
                break
        if left < 0:
            raise RequestTooLarge(
                f"the request's typed contents have more than {limits.max_values} elements: "
                "send tensors in raw_input_contents"
            )


def _skip_texts(data: bytes, start: int, end: int, left: int) -> tuple[int, int]:
    """Skip the short texts at the start of contents, quickly because there may be many.

    Return the position after them, and `left` minus their number.
    """
    while left >= 0 and start + 1 < end and data[start] == SHORT_TEXT and data[start + 1] < 128:
        start += 2 + data[start + 1]
        left -= 1
    return start, left


def _count_packed(data: bytes, field: int, start: int, end: int) -> int:
    if field in ITEM_BYTES:
        return (end - start) // ITEM_BYTES[field]
    count = 0
    for first in range(start, end, PIECE_BYTES):
        piece = np.frombuffer(data, np.uint8, min(PIECE_BYTES, end - first), first)
        count += int(np.count_nonzero(piece < 128))  # the last byte of each varint is below 128
    return count


class FieldWalk:
    """Iterates over protobuf fields, up to a maximum number. Raises InvalidRequest for invalid protobuf."""

    def __init__(self, data: bytes, max_fields: int, message: str = MESSAGE_NAME) -> None:
        """Prepare a walk over at most `max_fields` fields. `message` names the message in errors, with an article."""
        self._data = data
        self._most = self._left = max_fields
        self._message = message

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield each field's number, its wire type, and the start and end of its value."""
        while start < end:
            self._left -= 1
            if self._left < 0:
                raise RequestTooLarge(f"the request has more than {self._most} fields: send less")
            tag, start = self._read_varint(start, end)
            kind = tag & 7
            if kind == BYTES:
                length, start = self._read_varint(start, end)
                last = start + length
            elif kind == VARINT:
                _, last = self._read_varint(start, end)
            elif kind in FIXED_BYTES:
                last = start + FIXED_BYTES[kind]
            else:
                raise self._invalid_message()
            if last > end:
                raise self._invalid_message()
            yield tag >> 3, kind, start, last
            start = last

    def _read_varint(self, start: int, end: int) -> tuple[int, int]:
        """Return a number, and the position after it."""
        data = self._data
        value = shift = 0
        for position in range(start, min(start + 10, end)):
            byte = data[position]
            value |= (byte & 127) << shift
            if byte < 128:
                return value, position + 1
            shift += 7
        raise self._invalid_message()

    def _invalid_message(self) -> InvalidRequest:
        return InvalidRequest(f"the message is not {self._message}")
