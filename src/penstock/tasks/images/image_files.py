"""Reads BYTES inputs whose elements are JPEG or PNG files."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core.errors import Cancelled, InvalidImage, PenstockError, RequestTooLarge
from penstock.core.tensors import Tensor, unpack_bytes, view_bytes
from penstock.tasks.base import TaskRequest
from penstock.tasks.columns import check_column, take_inputs
from penstock.tasks.images.decoding import DecodedImage, ImageHeader, count_pixels, decode, read_header

IMAGE = "image"
MAX_SCANS = 32  # of a progressive JPEG; each costs a pass over all pixels, and most files have ten
EXPECTED = f"this model takes one input, '{IMAGE}' BYTES [n] or [n, 1], each element a JPEG or PNG file"


def take_files(request: TaskRequest, max_rows: int) -> Tensor:
    (tensor,) = take_inputs(request, [IMAGE], EXPECTED)
    check_column(tensor, EXPECTED, "image")
    if tensor.shape[0] > max_rows:
        raise RequestTooLarge(f"input '{IMAGE}' has {tensor.shape[0]} images; send at most {max_rows} per request")
    return tensor


def count_request_pixels(request: TaskRequest, max_rows: int) -> list[int]:
    """Return the number of pixels of each image, or an empty list if the request will be rejected."""
    try:
        return [count_pixels(file) for file in view_bytes(take_files(request, max_rows))]
    except PenstockError:
        return []


def read_headers(tensor: Tensor, max_pixels: int) -> list[ImageHeader]:
    """Read the headers of all images, so that an invalid request is rejected before any image is decoded."""
    headers = []
    for index, file in enumerate(unpack_bytes(tensor)):
        with _add_index_to_errors(index):
            headers.append(header := read_header(file))
            if header.pixels > max_pixels:
                raise InvalidImage(
                    f"the image's header declares {header.size} pixels; "
                    f"this model takes at most {max_pixels}: shrink the image, or send parts of it"
                )
            if header.scans > MAX_SCANS:
                raise InvalidImage(
                    f"the JPEG image has {header.scans} scans; at most {MAX_SCANS} are allowed: save it again"
                )
    return headers


def decode_all(headers: list[ImageHeader], request: TaskRequest) -> Iterator[DecodedImage]:
    """Decode the images one by one; remove each header from the list, so that its decoded pixels can be freed."""
    for index in range(len(headers)):
        if not request.inputs:
            raise Cancelled("the request was cancelled")
        with _add_index_to_errors(index):
            yield decode(headers.pop(0))


@contextmanager
def _add_index_to_errors(index: int) -> Iterator[None]:
    """Add the input's name and the element's index to InvalidImage errors in the body of the `with` statement."""
    try:
        yield
    except InvalidImage as error:
        raise InvalidImage(f"input '{IMAGE}' element {index}: {error.message}") from error
