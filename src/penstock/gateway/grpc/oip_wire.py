"""Large gRPC messages as they come: what parsing one would build, counted by its tags and lengths before it is."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, RequestTooLarge

# Room for names, shapes and parameters beside the tensors, whose bytes admission counts exactly.
ENVELOPE_BYTES = 1024 * 1024
PIECE_BYTES = 1024 * 1024
# Kinds of fields in protobuf's encoding. Groups (3 and 4) are in none of our messages.
VARINT, BYTES = 0, 2
FIXED_BYTES = {1: 8, 5: 4}
# Fields of ModelInferRequest, and of its InferInputTensor.
PARAMETERS, INPUTS, OUTPUTS, RAW = 4, 5, 6, 7
CONTENTS = 5
FIELDS_OF_TENSOR = 16  # with its parameters and its raw bytes: far more than any has
# Fields of InferTensorContents: numbers of a fixed size, and what is never packed. The others are packed varints.
ITEM_BYTES = {6: 4, 7: 8}
TEXTS = 8
SHORT_TEXT = TEXTS << 3 | BYTES  # the byte before its length
FIELDS_OF_CONTENTS = 1024 * 1024  # beside short texts: a large message of longer ones has fewer
COUNTED = {
    PARAMETERS: ("parameters", "max_parameters"),
    INPUTS: ("inputs", "max_tensors"),
    OUTPUTS: ("outputs", "max_tensors"),
    RAW: ("raw_input_contents", "max_tensors"),
}


@dataclass(slots=True)
class TypedMessage:
    """A message whose typed contents are large; `spans` says where they are."""

    data: bytes
    spans: list[tuple[int, int]]

    def take(self) -> bytes:
        """Once: nobody else holds it while the request is served."""
        data, self.data = self.data, b""
        return data


def find_contents(data: bytes, limits: Limits) -> list[tuple[int, int]]:
    """Where a ModelInferRequest has typed contents. Raises where it names too much beside tensors' bytes."""
    spans: list[tuple[int, int]] = []
    counts = dict.fromkeys(COUNTED, 0)
    beside = len(data)
    walk = _Walk(data, FIELDS_OF_TENSOR * limits.max_tensors + limits.max_parameters)
    for field, kind, start, end in walk.fields(0, len(data)):
        if field not in counts or kind != BYTES:
            continue
        counts[field] += 1
        what, setting = COUNTED[field]
        if counts[field] > getattr(limits, setting):
            raise RequestTooLarge(
                f"the request has more than {getattr(limits, setting)} {what} (limits.{setting}): send fewer"
            )
        if field == RAW:
            beside -= end - start
        elif field == INPUTS:
            found = [
                (first, last)
                for number, form, first, last in walk.fields(start, end)
                if number == CONTENTS and form == BYTES
            ]
            beside -= sum(last - first for first, last in found)
            spans += found
    if beside > ENVELOPE_BYTES:
        raise RequestTooLarge(
            f"the request has {beside} bytes beside its tensors, and may have {ENVELOPE_BYTES}: "
            f"send shorter names and parameters"
        )
    return spans


def check_contents(message: TypedMessage, limits: Limits) -> None:
    """Raises where typed contents have too many elements."""
    data, left = message.data, limits.max_values
    walk = _Walk(data, FIELDS_OF_CONTENTS)
    for start, end in message.spans:
        start, left = _skip_texts(data, start, end, left)
        for field, kind, first, last in walk.fields(start, end):
            left -= 1 if kind != BYTES or field == TEXTS else _packed(data, field, first, last)
            if left < 0:
                break
        if left < 0:
            raise RequestTooLarge(
                f"the request's typed contents have more than {limits.max_values} elements (limits.max_values): "
                f"send tensors in raw_input_contents"
            )


def _skip_texts(data: bytes, start: int, end: int, left: int) -> tuple[int, int]:
    """Where the short texts end with which contents begin, and how many elements may follow: quick, as may be many."""
    while left >= 0 and start + 1 < end and data[start] == SHORT_TEXT and data[start + 1] < 128:
        start += 2 + data[start + 1]
        left -= 1
    return start, left


def _packed(data: bytes, field: int, start: int, end: int) -> int:
    if field in ITEM_BYTES:
        return (end - start) // ITEM_BYTES[field]
    count = 0
    for first in range(start, end, PIECE_BYTES):
        piece = np.frombuffer(data, np.uint8, min(PIECE_BYTES, end - first), first)
        count += int(np.count_nonzero(piece < 128))  # the last byte of each
    return count


class _Walk:
    """Over the fields of messages within one; raises for what is not protobuf, and for more fields than it may see."""

    def __init__(self, data: bytes, most: int) -> None:
        self._data = data
        self._most = self._left = most

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Number, kind, and the value's first byte and the one after its last."""
        data = self._data
        while start < end:
            self._left -= 1
            if self._left < 0:
                raise RequestTooLarge(f"the request has more than {self._most} fields: send fewer tensors")
            tag, start = _varint(data, start, end)
            kind = tag & 7
            if kind == BYTES:
                length, start = _varint(data, start, end)
                last = start + length
            elif kind == VARINT:
                _, last = _varint(data, start, end)
            elif kind in FIXED_BYTES:
                last = start + FIXED_BYTES[kind]
            else:
                raise _unreadable()
            if last > end:
                raise _unreadable()
            yield tag >> 3, kind, start, last
            start = last


def _varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    value = shift = 0
    for position in range(start, min(start + 10, end)):
        byte = data[position]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position + 1
        shift += 7
    raise _unreadable()


def _unreadable() -> InvalidRequest:
    return InvalidRequest("the message is not an inference.ModelInferRequest")
