"""Packets over REST: as JSON, and as forms."""

import base64
import binascii
import time
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest
from penstock.core.packets import PacketFile
from penstock.core.principals import INFERENCE_SCOPES
from penstock.core.requests import InferRequest, PacketFields
from penstock.endpoints.http.openapi import Route, make_json_answer
from penstock.endpoints.large_messages import LARGE_BYTES
from penstock.features.async_requests.async_rest import ASYNC, build_accepted_response
from penstock.gateway.blocks.packet import MAX_SHOWN_CHARS, BlockPacket, check_packet, parse_metadata
from penstock.gateway.blocks.packet_answer import AnswerParts
from penstock.gateway.blocks.packet_calls import PacketCalls, make_answer_body
from penstock.gateway.blocks.packet_inputs import PacketInputs
from penstock.gateway.blocks.packet_schemas import PacketAnswerBody, PacketBody
from penstock.gateway.http_calls import RestCall, RestCalls, validate
from penstock.gateway.v1.multipart import FormPart

FORM_TYPE = "multipart/form-data"
METADATA_SUFFIX = "_metadata"  # the suffix of a form field's name: `NAME_metadata` is the metadata of the file NAME
TEXT_FIELDS = ("data", "selection_query", "query_parameters", "graph", "output_ptr", "frame_ptr")
NUMBER_FIELDS: Mapping[str, type] = {"seq_no": int, "ts": float}
FIELDS = ("block_id", "model", "session_id", "mode", *NUMBER_FIELDS, *TEXT_FIELDS)
# A JSON body without `inputs` is a packet if it has one of these keys.
PACKET_KEYS = frozenset({*FIELDS, "files"} - {"model", "mode"})
PACKET_FORM = {
    "schema": {
        "type": "object",
        "properties": {name: {"type": "string"} for name in FIELDS},
        "required": ["session_id"],
    }
}
FORM_DESCRIPTION = """The fields are those of a packet in JSON. Every file of the form is a file of the packet.
The field `NAME_metadata` has the metadata of the file in the field `NAME`, as JSON."""


def is_packet(message: Mapping[str, Any]) -> bool:
    return "inputs" not in message and not PACKET_KEYS.isdisjoint(message)


class PacketRest:
    def __init__(self, calls: RestCalls, packets: PacketCalls) -> None:
        self._calls = calls
        self._packets = packets

    @Route(
        "POST",
        "/v1/infer-multipart",
        "Run any block with a packet in a form",
        FORM_DESCRIPTION,
        needs=INFERENCE_SCOPES,
        binary_body={FORM_TYPE: PACKET_FORM},
        answer=PacketAnswerBody,
    )
    async def infer_form(self, request: Request) -> Response:
        with self._calls.count_rejections(request):
            call = await self._calls.read_call(request)
            if call.content_type != FORM_TYPE:
                raise InvalidRequest(f"unsupported content-type '{call.content_type[:80]}': send {FORM_TYPE}")
            body = parse_form(await self._calls.read_form(call))
            packet = parse_packet(body, self._calls.limits)
        return await self.run(call, packet)

    def read(self, message: dict[str, Any]) -> BlockPacket:
        """Return the packet in a JSON body."""
        return parse_packet(message, self._calls.limits)

    async def run(self, call: RestCall, packet: BlockPacket) -> Response:
        request = InferRequest("", [])
        self._calls.complete_request(call, request)
        with self._calls.count_rejections(call.request, request):
            inputs = await self._packets.prepare(packet, request)
            if inputs.is_async and ASYNC not in call.request.scope:
                return build_accepted_response(await self._packets.start(request, inputs, call.request.url.path))
        with self._calls.watch_disconnect(call):
            parts = await self._packets.run(request, inputs)
        call.limit_statuses = request.limit_statuses
        return await self._answer(call, inputs, parts)

    async def _answer(self, call: RestCall, inputs: PacketInputs, parts: AnswerParts) -> Response:
        fields, now = inputs.packet.fields, time.time()

        def make() -> Response:
            return make_json_answer(make_answer_body(fields, parts, now), headers=call.answer_headers)

        size_bytes = len(parts.data) + sum([len(file.data) for file in parts.files])
        return make() if size_bytes <= LARGE_BYTES else await self._calls.encode(size_bytes, make)


def parse_packet(message: dict[str, Any], limits: Limits) -> BlockPacket:
    body = validate(PacketBody, message)
    if body.block_id and body.model and body.block_id != body.model:
        raise InvalidRequest("'block_id' and 'model' name different blocks: give only one of them", parameter="model")
    fields = PacketFields(
        body.session_id,
        body.seq_no,
        body.ts,
        _to_text(body.data).encode(),
        _to_text(body.selection_query),
        _to_text(body.graph),
        _to_text(body.frame_ptr).encode(),
    )
    files = [
        PacketFile(parse_metadata(index, _to_text(file.metadata)), _decode_base64(index, file.file_data))
        for index, file in enumerate(body.files)
    ]
    packet = check_packet(body.block_id or body.model or "", fields, files, time.time(), limits)
    packet.is_async = body.mode == "async"
    return packet


def parse_form(parts: list[FormPart]) -> dict[str, Any]:
    """Return a form's fields and files as the JSON body of a packet, but with the files as bytes instead of base64."""
    names = {part.name for part in parts if part.is_file}
    body: dict[str, Any] = {}
    files: list[tuple[str, bytes]] = []
    metadata: dict[str, list[str]] = {}
    for part in parts:
        of_file = part.name.removesuffix(METADATA_SUFFIX)
        if part.name.endswith(METADATA_SUFFIX) and of_file in names:
            metadata.setdefault(of_file, []).append(_decode_text(part))
        elif part.is_file:
            files.append((part.name, part.data))
        elif part.name not in FIELDS:
            raise InvalidRequest(
                f"unknown field '{part.name[:MAX_SHOWN_CHARS]}': a packet has {', '.join(FIELDS)}, files, and "
                f"NAME{METADATA_SUFFIX} beside the file NAME"
            )
        elif part.name in body:
            raise InvalidRequest(f"the field '{part.name}' is given twice: send it once")
        else:
            body[part.name] = _parse_number(part) if part.name in NUMBER_FIELDS else _decode_text(part)
    body["files"] = [{"metadata": _pop_metadata(metadata, name), "file_data": data} for name, data in files]
    if surplus := next((name for name, left in metadata.items() if left), ""):
        raise InvalidRequest(
            f"there are more fields '{surplus[:MAX_SHOWN_CHARS]}{METADATA_SUFFIX}' than files of that name: "
            "send one for each file"
        )
    return body


def _pop_metadata(metadata: dict[str, list[str]], name: str) -> str | None:
    found = metadata.get(name)
    return found.pop(0) if found else None


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else orjson.dumps(value).decode()


def _decode_base64(index: int, content: str | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"'files.{index}.file_data' is not base64: {error}") from error


def _parse_number(part: FormPart) -> int | float:
    kind = NUMBER_FIELDS[part.name]
    try:
        found: int | float = kind(_decode_text(part)[:MAX_SHOWN_CHARS])
    except ValueError as error:
        raise InvalidRequest(f"the field '{part.name}' is not a number: {part.data[:MAX_SHOWN_CHARS]!r}") from error
    return found


def _decode_text(part: FormPart) -> str:
    try:
        return part.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the field '{part.name[:MAX_SHOWN_CHARS]}' is not UTF-8: send UTF-8 text") from error
