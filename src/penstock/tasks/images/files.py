"""BYTES inputs whose elements are JPEG or PNG files."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core.errors import Cancelled, InvalidImage, PenstockError, RequestTooLarge
from penstock.core.tensors import Tensor, unpack_bytes, view_bytes
from penstock.tasks.base import TaskRequest
from penstock.tasks.columns import check_column, take_inputs
from penstock.tasks.images.decoding import DecodedImage, ImageHeader, count_pixels, decode, read_header

IMAGE = "image"
EXPECTED = f"this model takes one input, '{IMAGE}' BYTES [n] or [n, 1], each element a JPEG or PNG file"


def take_files(request: TaskRequest, max_rows: int) -> Tensor:
    (tensor,) = take_inputs(request, [IMAGE], EXPECTED)
    check_column(tensor, EXPECTED, "image")
    if tensor.shape[0] > max_rows:
        raise RequestTooLarge(f"input '{IMAGE}' has {tensor.shape[0]} images; send at most {max_rows} at a time")
    return tensor


def count_request_pixels(request: TaskRequest, max_rows: int) -> list[int]:
    """Of each image; of a request that will be refused, none."""
    try:
        return [count_pixels(file) for file in view_bytes(take_files(request, max_rows))]
    except PenstockError:
        return []


def read_headers(tensor: Tensor, max_pixels: int, max_scans: int) -> list[ImageHeader]:
    """Every header before any pixel: a request that is refused costs no decoding."""
    headers = []
    for index, file in enumerate(unpack_bytes(tensor)):
        with _naming(index):
            headers.append(header := read_header(file))
            if header.pixels > max_pixels:
                raise InvalidImage(
                    f"the image says it has {header.size} pixels; "
                    f"this model takes at most {max_pixels}: shrink it or send parts of it"
                )
            if header.scans > max_scans:
                raise InvalidImage(
                    f"the JPEG image has {header.scans} scans; this model takes at most {max_scans}: save it anew"
                )
    return headers


def decode_all(headers: list[ImageHeader], request: TaskRequest) -> Iterator[DecodedImage]:
    """Takes each off the list: one that is decoded keeps its pixels for as long as it is held."""
    for index in range(len(headers)):
        if not request.inputs:
            raise Cancelled("nobody waits for this request any more")
        with _naming(index):
            yield decode(headers.pop(0))


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Says in an error which element it is of."""
    try:
        yield
    except InvalidImage as error:
        raise InvalidImage(f"input '{IMAGE}' element {index}: {error.message}") from error
