"""A row of the request log, and the functions that make rows from requests."""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.requests import InferRequest, PacketFields
from penstock.core.tensors import BYTES, ITEM_SIZES, NUMPY_TYPES, Buffer, Tensor

ANSWERED = "ok"  # the status of a request that did not fail
MAX_ID_BYTES = 256  # an index of PostgreSQL takes at most 2,704 bytes per entry
KEPT_ID_CHARS = 48  # at most four bytes each, so that the digest also fits
MAX_TS_S = 253_402_300_800.0  # the year 10000
ROW_BYTES = 1024  # memory of a row in addition to its payload
LENGTH_BYTES = 4  # before each element of a BYTES tensor
UNSUPPORTED_NUMBERS = ("BF16",)  # data types that JSON cannot represent


class LogRow(NamedTuple):
    """One request. The fields are the columns of the table, in the table's order."""

    request_id: str
    ts_us: int  # arrival by the gateway's clock, in microseconds since 1970
    session_id: str | None
    block_id: str | None  # None: the request failed before a block was chosen
    seq_no: int | None
    client_ts_us: int | None  # by the client's clock
    frame_ptr: bytes | None
    data: bytes | None
    query_parameters: bytes | None
    output_ptr: bytes | None
    status: str  # ok, or the code of an error
    key_id: str | None  # None: the caller needed no key
    key_name: str | None
    protocol: str
    model: str
    version: str
    duration_ms: float
    request_bytes: int
    response_bytes: int
    data_bytes: int  # of `data` before it was cut
    gateway: str  # id of the gateway that wrote the row


SEQ_NO = LogRow._fields.index("seq_no")


class RequestEnd(NamedTuple):
    """The end of a request. Times are by the gateway's clock."""

    status: str
    at_s: float  # in seconds since 1970
    duration_s: float
    response_bytes: int


def make_log_row(
    request: InferRequest,
    block: BlockDescription | None,
    ending: RequestEnd,
    gateway: str,
    max_payload_bytes: int,
) -> LogRow:
    """Return the log row of a request that has ended. The row never contains uploaded files."""
    packet, principal, step = request.packet, request.principal, request.controls.session
    seq_no: int | None
    if packet is not None:
        session_id, seq_no, client_ts_us = packet.session_id, packet.seq_no, _convert_client_time(packet.ts)
        whole: Buffer = packet.data
    else:
        session_id = "" if step is None else step.session_id.removeprefix(principal.prefix_session_id(""))
        seq_no, client_ts_us = (None if step is None else step.seq_no), None
        whole = _show_inputs(request.inputs, max_payload_bytes) if max_payload_bytes else b""
    return LogRow(
        shorten_id(request.request_id),
        int((ending.at_s - ending.duration_s) * 1e6),
        shorten_id(session_id) or None,
        None if block is None else block.block_id,
        seq_no,
        client_ts_us,
        *_payload_columns(packet, whole, max_payload_bytes),
        ending.status,
        principal.key_id or None,
        principal.name if principal.key_id else None,
        request.protocol,
        block.model if block is not None else shorten_id(request.model),
        block.version if block is not None else shorten_id(request.version),
        ending.duration_s * 1e3,
        request.size_bytes,
        ending.response_bytes,
        len(whole) if packet is not None else sum([len(tensor.data) for tensor in request.inputs]),
        gateway,
    )


def restore_row(values: Iterable[Any]) -> LogRow:
    """Return the row with the column values that a store returned, whose `seq_no` may be a text or a decimal."""
    found = LogRow._make(values)
    return found if found.seq_no is None else found._replace(seq_no=int(found.seq_no))


def convert_seq_no(row: LogRow, make: Callable[[int], Any]) -> tuple[Any, ...]:
    """Return the row's values; convert `seq_no` with `make` unless it is None."""
    if row.seq_no is None:
        return row
    return (*row[:SEQ_NO], make(row.seq_no), *row[SEQ_NO + 1 :])


def estimate_size(row: LogRow) -> int:
    """Estimate the bytes of memory that the row takes."""
    payload = (row.frame_ptr, row.data, row.query_parameters, row.output_ptr)
    return ROW_BYTES + sum([len(each) for each in payload if each is not None])


def shorten_id(request_id: str) -> str:
    """Return the id in a form that every store can index: without NUL, and with a digest in place of a long end.

    Queries must convert the ids to find in this way, too.
    """
    if len(request_id) <= MAX_ID_BYTES and request_id.isascii() and "\0" not in request_id:
        return request_id
    raw = request_id.replace("\0", "\ufffd").encode("utf-8", "replace")
    text = raw.decode()
    if len(raw) <= MAX_ID_BYTES:
        return text
    return f"{text[:KEPT_ID_CHARS]}~{blake2b(raw, digest_size=16).hexdigest()}"


def _convert_client_time(ts_s: float) -> int | None:
    return int(ts_s * 1e6) if 0.0 < ts_s < MAX_TS_S else None  # False for NaN


def _payload_columns(
    packet: PacketFields | None, data: Buffer, max_bytes: int
) -> tuple[bytes | None, bytes | None, bytes | None, bytes | None]:
    """Return frame_ptr, data, query_parameters and output_ptr, each cut at `max_bytes`."""
    if not max_bytes:
        return None, None, None, None
    if packet is None:
        return None, bytes(data[:max_bytes]) or None, None, None
    return (
        packet.frame_ptr[:max_bytes] or None,
        bytes(data[:max_bytes]) or None,
        packet.query_parameters[:max_bytes].encode("utf-8", "replace")[:max_bytes] or None,
        packet.output_ptr[:max_bytes].encode("utf-8", "replace")[:max_bytes] or None,
    )


def _show_inputs(inputs: Sequence[Tensor], max_bytes: int) -> bytes:
    """Return tensors as JSON: texts and small tensors with their values, other tensors with their size."""
    found: dict[str, Any] = {}
    for tensor in inputs:
        found[tensor.name] = _show_tensor(tensor, max_bytes)
        max_bytes -= len(tensor.data)
        if max_bytes <= 0:
            break
    return orjson.dumps({"inputs": found}, option=orjson.OPT_SERIALIZE_NUMPY)


def _show_tensor(tensor: Tensor, max_bytes: int) -> Any:
    if tensor.datatype == BYTES:
        return _show_texts(tensor.data, max_bytes)
    is_shown = (
        tensor.datatype in ITEM_SIZES and tensor.datatype not in UNSUPPORTED_NUMBERS and len(tensor.data) <= max_bytes
    )
    if is_shown and len(tensor.data) % ITEM_SIZES[tensor.datatype] == 0:
        return np.frombuffer(tensor.data, NUMPY_TYPES[tensor.datatype])
    return {"datatype": tensor.datatype, "shape": tensor.shape}


def _show_texts(data: Buffer, max_bytes: int) -> list[Any]:
    """Return the elements that begin in the first `max_bytes` of the data. Files are replaced by their size."""
    found: list[Any] = []
    at, end = 0, min(len(data), max_bytes)
    while at + LENGTH_BYTES <= end:
        start = at + LENGTH_BYTES
        size = int.from_bytes(data[at:start], "little")
        element = bytes(data[start : min(start + size, start + max_bytes)])
        # The last character may be incomplete.
        text = element.decode("utf-8", "ignore") if size > len(element) else _decode_text(element)
        is_text = text is not None and "\0" not in text and len(text.encode()) > len(element) - LENGTH_BYTES
        found.append(text if is_text else {"bytes": size})
        at = start + size
    return found


def _decode_text(element: bytes) -> str | None:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return None
