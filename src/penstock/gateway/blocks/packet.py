"""A packet of the block protocol, in any transport: the block that it names, its fields and its files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NoReturn

import orjson

from penstock.core.config import Limits
from penstock.core.controls import MAX_SESSION_ID
from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.core.packets import PacketFile
from penstock.core.requests import PacketFields

MAX_SEQ_NO = 2**64 - 1
MAX_BLOCK_CHARS = 256
MAX_SHOWN_CHARS = 80  # of a value, in an error message
GRAPH, OUTPUTS = "graph", "outputs"
NOT_SUPPORTED = "not_supported"  # the reason of an error about a part of the protocol that the server does not have


@dataclass(slots=True)
class BlockPacket:
    block: str  # a block id or a model's name; empty: `fields.query_parameters` selects the block
    fields: PacketFields
    files: Sequence[PacketFile] = field(default_factory=list)
    is_async: bool = False  # by the field `mode` of REST; the data may also request it

    @property
    def size_bytes(self) -> int:
        return len(self.fields.data) + sum([len(file.data) for file in self.files])


def check_packet(
    block: str, fields: PacketFields, files: Sequence[PacketFile], now: float, limits: Limits
) -> BlockPacket:
    """Return the packet; raise InvalidRequest for a wrong field.

    `now` replaces a missing `ts`. A graph of exactly one block is a request for that block.
    """
    session_id = fields.session_id
    if not 0 < len(session_id) <= MAX_SESSION_ID:
        problem = f"it has {len(session_id)} characters" if session_id else "it is empty"
        raise InvalidRequest(
            f"'session_id' is required: a text of 1 to {MAX_SESSION_ID} characters; {problem}", parameter="session_id"
        )
    if not 0 <= fields.seq_no <= MAX_SEQ_NO:
        raise InvalidRequest(
            f"'seq_no' is {fields.seq_no}; it must be a whole number from 0 to 2^64 - 1", parameter="seq_no"
        )
    if not isfinite(fields.ts) or fields.ts < 0:
        raise InvalidRequest(f"'ts' is {fields.ts}; it must be seconds since 1970, or 0 for now", parameter="ts")
    fields.ts = fields.ts or now
    if len(block) > MAX_BLOCK_CHARS:
        raise InvalidRequest(
            f"'block_id' has {len(block)} characters; at most {MAX_BLOCK_CHARS} are allowed", parameter="block_id"
        )
    if fields.frame_ptr:
        _refuse_frame(fields.frame_ptr)
    if fields.output_ptr:
        block = _find_only_block(fields.output_ptr, block)
    if not block and not fields.query_parameters:
        raise InvalidRequest(
            "'block_id' is required: name a block, or select one with 'query_parameters'", parameter="block_id"
        )
    if fields.query_parameters:
        parse_text("query_parameters", fields.query_parameters)
    if len(files) > limits.max_rows:
        raise RequestTooLarge(
            f"the packet has {len(files)} files, over limits.max_rows ({limits.max_rows}): split the request"
        )
    return BlockPacket(block, fields, files)


def parse_metadata(index: int, text: str) -> Mapping[str, Any]:
    """Return a file's metadata; an empty text is an empty object."""
    return parse_text(f"files.{index}.metadata", text) if text else {}


def parse_text(name: str, text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a field of a packet; raise InvalidRequest if the field holds anything else."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"'{name}' is not JSON: {error}", parameter=name) from error
    if type(found) is not dict:
        raise InvalidRequest(f"'{name}' is {_shorten(text)}; it must be a JSON object", parameter=name)
    return found


def _refuse_frame(frame_ptr: bytes) -> NoReturn:
    frame = parse_text("frame_ptr", frame_ptr)
    for key in ("framedb_id", "key"):
        if not isinstance(frame.get(key), str) or not frame[key]:
            raise InvalidRequest(f"'frame_ptr' needs '{key}', a text that is not empty", parameter="frame_ptr")
    raise InvalidRequest(
        f"'frame_ptr' names the frame '{frame['key'][:MAX_SHOWN_CHARS]}', but this server has no frame stores: send "
        "the content in 'files'",
        parameter="frame_ptr",
        reason=NOT_SUPPORTED,
    )


def _find_only_block(output_ptr: str, block: str) -> str:
    """Return the only block of a graph; raise InvalidRequest for a graph of several blocks, or of another block."""
    found = parse_text("output_ptr", output_ptr)
    graph = found.get(GRAPH, found)
    if type(graph) is not dict:
        raise InvalidRequest(
            f"'output_ptr': '{GRAPH}' must be an object that maps each block to the list of its successors",
            parameter="output_ptr",
        )
    followers = {name: _parse_successors(name, each) for name, each in graph.items()}
    if not followers:
        return block
    (name, following), *others = followers.items()
    if others or following:
        count = len(followers.keys() | {each for names in followers.values() for each in names})
        raise InvalidRequest(
            f"'output_ptr' is a graph of {count} blocks, but this server runs one block per packet: send one packet "
            "to each block",
            parameter="output_ptr",
            reason=NOT_SUPPORTED,
        )
    if block not in ("", name):
        raise InvalidRequest(
            f"'output_ptr' has the block '{name[:MAX_SHOWN_CHARS]}', but 'block_id' is '{block}': name the same block",
            parameter="output_ptr",
        )
    return str(name)


def _parse_successors(name: str, value: Any) -> list[str]:
    """Return the successors of a block from a list of their ids, or from an object with that list in `outputs`."""
    found = value.get(OUTPUTS) if type(value) is dict else value
    if type(found) is not list or not all(type(each) is str and each for each in found):
        raise InvalidRequest(
            f"'output_ptr': '{name[:MAX_SHOWN_CHARS]}' must have a list of block ids, or an object with that list as "
            f"'{OUTPUTS}'",
            parameter="output_ptr",
        )
    return found


def _shorten(text: str | bytes) -> str:
    plain = text if isinstance(text, str) else text.decode(errors="replace")
    return json.dumps(plain if len(plain) <= MAX_SHOWN_CHARS else f"{plain[:MAX_SHOWN_CHARS]}…", ensure_ascii=False)
