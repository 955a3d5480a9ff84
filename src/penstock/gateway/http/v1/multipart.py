"""multipart/form-data bodies, already read and within their limit."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 1024
MAX_HEADER_BYTES = 16 * 1024  # of one part
NAME = b"content-disposition"


@dataclass(slots=True)
class FormPart:
    name: str
    is_file: bool
    data: bytes


def parse_multipart(content_type: bytes, body: bytes) -> list[FormPart]:
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidRequest("multipart/form-data without a boundary")
    collector = _Collector()
    try:
        parser = MultipartParser(boundary, collector.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the body is not multipart/form-data: {error}") from error
    if not collector.is_complete:
        raise InvalidRequest("the body is not multipart/form-data: it is cut off")
    return collector.parts


class _Collector:
    def __init__(self) -> None:
        self.parts: list[FormPart] = []
        self.is_complete = False
        self._disposition = self._key = self._value = b""  # of the part that is open
        self._data: list[bytes] = []

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._part_data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        if len(self.parts) >= MAX_PARTS:
            raise InvalidRequest(f"the body has more than {MAX_PARTS} parts")
        self._disposition, self._data = b"", []

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._key += data[start:end]
        self._check_header()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._key) + len(self._value) > MAX_HEADER_BYTES:
            raise InvalidRequest("a part's header is too long")

    def _header_end(self) -> None:
        if self._key.lower() == NAME:
            self._disposition = self._value
        self._key = self._value = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])

    def _end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if not name:
            raise InvalidRequest("a part has no name in its Content-Disposition")
        self.parts.append(FormPart(name, b"filename" in options, b"".join(self._data)))

    def _finish(self) -> None:
        self.is_complete = True
