"""Parser of multipart/form-data bodies that were read within the size limit."""

from dataclasses import dataclass

from python_multipart.multipart import parse_options_header

from penstock.core.errors import InvalidRequest

MAX_PARTS = 1024
MAX_HEADER_BYTES = 16 * 1024  # of one part
MAX_BOUNDARY_BYTES = 256
LINE_END = b"\r\n"
NAME_HEADER = b"content-disposition"


@dataclass(slots=True)
class FormPart:
    name: str
    is_file: bool
    data: bytes


def parse_multipart(content_type: bytes, body: bytes) -> list[FormPart]:
    """Return the parts of a body. Data is skipped with `bytes.find`, not parsed byte by byte."""
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
        raise InvalidRequest(f"multipart/form-data needs a boundary of 1 to {MAX_BOUNDARY_BYTES} bytes")
    between = LINE_END + b"--" + boundary
    end = len(between) - len(LINE_END) if body.startswith(between[len(LINE_END) :]) else _find_end(body, between, 0)
    parts: list[FormPart] = []
    while body[end : end + 2] != b"--":
        if len(parts) >= MAX_PARTS:
            raise InvalidRequest(f"the body has more than {MAX_PARTS} parts: send fewer")
        head, start = _find_head(body, end)
        end = _find_end(
            body, between, start - len(LINE_END)
        )  # the boundary of an empty part overlaps the end of its header
        name, is_file = _read_head(head)
        parts.append(FormPart(name, is_file, body[start : max(start, end - len(between))]))
    return parts


def _find_end(body: bytes, boundary: bytes, start: int) -> int:
    found = body.find(boundary, start)
    if found < 0:
        raise InvalidRequest("the body is not valid multipart/form-data: the last boundary is missing")
    return found + len(boundary)


def _find_head(body: bytes, boundary_end: int) -> tuple[bytes, int]:
    """Return a part's header lines, and the position of its data."""
    end = body.find(LINE_END + LINE_END, boundary_end, boundary_end + MAX_HEADER_BYTES)
    if end < 0:
        raise InvalidRequest("the body is not valid multipart/form-data: a part's header is too long or incomplete")
    rest, _, head = body[boundary_end:end].partition(LINE_END)
    if rest.strip(b" \t"):
        raise InvalidRequest("the body is not valid multipart/form-data: a boundary is followed by other text")
    return head, end + 2 * len(LINE_END)


def _read_head(head: bytes) -> tuple[str, bool]:
    """Return the part's name, and whether it is a file."""
    disposition = b""
    for line in head.split(LINE_END):
        key, colon, value = line.partition(b":")
        if not colon:
            raise InvalidRequest("the body is not valid multipart/form-data: a line of a part's header has no colon")
        if key.strip().lower() == NAME_HEADER:
            disposition = value.strip()
    options = parse_options_header(disposition)[1]
    name = options.get(b"name", b"").decode("utf-8", "replace")
    if not name:
        raise InvalidRequest("a part of the form has no name in its Content-Disposition: give each part a name")
    return name, b"filename" in options
