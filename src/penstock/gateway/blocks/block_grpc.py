"""The block protocol over gRPC."""

import time
from collections.abc import Callable
from typing import TypeAlias
from uuid import uuid4

import grpc
import orjson
from google.protobuf.message import DecodeError

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, PenstockError, RequestTooLarge, remove_trace
from penstock.core.packets import PacketFile
from penstock.core.principals import INFERENCE_SCOPES, Principal
from penstock.core.requests import InferRequest, PacketFields
from penstock.endpoints import statuses
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.http.http_message import parse_request_id
from penstock.endpoints.large_messages import HUGE_BYTES, LARGE_BYTES
from penstock.gateway.blocks.packet import BlockPacket, check_packet, parse_metadata
from penstock.gateway.blocks.packet_answer import AnswerParts
from penstock.gateway.blocks.packet_calls import PacketCalls
from penstock.gateway.oip.grpc_service import OipGrpc
from penstock.gateway.oip.message_size import BYTES, FieldWalk
from penstock.pb.blocks import inference_pb2 as pb
from penstock.serving.admission import Admission

Context: TypeAlias = grpc.aio.ServicerContext
PROTOCOL = "packet"
REQUEST_ID = "x-request-id"
PATH = "/BlockInferenceService/infer"
MESSAGE_NAME = "a BlockInferencePacket"
FILES_FIELD = 9  # the field of BlockInferencePacket
MAX_FIELDS_PER_FILE = 8  # including repeated ones, of which the last counts
# A parsed packet, a huge packet as bytes, or an error: if the reader raised it, gRPC would answer with UNKNOWN.
PacketMessage: TypeAlias = pb.BlockInferencePacket | bytes | PenstockError


class BlockGrpc:
    def __init__(self, calls: PacketCalls, edge: OipGrpc) -> None:
        """Create the service. `edge` adds the caller's connection to requests, as for the Open Inference Protocol."""
        self._calls = calls
        self._edge = edge

    @needs_scope(*INFERENCE_SCOPES)
    async def infer(self, message: PacketMessage, context: Context, principal: Principal) -> pb.AIOSPacket:
        request = InferRequest("", [], request_id=uuid4().hex, protocol=PROTOCOL)
        self._edge.add_context(request, context, principal)
        try:
            request.request_id = _read_request_id(context) or request.request_id
            packet = await self._decode_message(message)
            del message
            inputs = await self._calls.prepare(packet, request)
            if inputs.is_async:
                request.timeout_s = None  # the call's deadline applies only to the answer with the id
                record = await self._calls.start(request, inputs, PATH)
                return encode_packet(packet.fields, AnswerParts(orjson.dumps(record.document())), time.time())
        except PenstockError as error:
            self._calls.serving.count_rejected(PROTOCOL, error, request)
            raise
        parts = await self._calls.run(request, inputs)
        trailer = {REQUEST_ID: request.request_id, **statuses.make_limit_headers(request.limit_statuses)}
        context.set_trailing_metadata(tuple(trailer.items()))
        size_bytes = len(parts.data) + sum([len(file.data) for file in parts.files])
        if size_bytes > LARGE_BYTES:
            self._edge.traffic.hold_answer(context, size_bytes)
        return encode_packet(packet.fields, parts, time.time())

    async def _decode_message(self, message: PacketMessage) -> BlockPacket:
        if isinstance(message, PenstockError):
            raise message
        if isinstance(message, bytes):
            message = await self._calls.large.decode(len(message), parse_packet, message)
        return decode_packet(message, time.time(), self._calls.large.limits)


def _read_request_id(context: Context) -> str:
    """Return the request's id in the call's metadata, or an empty text."""
    found = next((value for name, value in context.invocation_metadata() or () if name == REQUEST_ID), b"")
    return parse_request_id(found.encode() if isinstance(found, str) else found)


def decode_packet(message: pb.BlockInferencePacket, now: float, limits: Limits) -> BlockPacket:
    fields = PacketFields(
        message.session_id,
        message.seq_no,
        message.ts,
        message.data.encode(),
        message.query_parameters,
        message.output_ptr,
        message.frame_ptr,
    )
    files = [
        PacketFile(parse_metadata(index, file.metadata), file.file_data) for index, file in enumerate(message.files)
    ]
    return check_packet(message.block_id, fields, files, now, limits)


def encode_packet(fields: PacketFields, parts: AnswerParts, now: float) -> pb.AIOSPacket:
    answer = pb.AIOSPacket(session_id=fields.session_id, seq_no=fields.seq_no, data=parts.data.decode(), ts=now)
    for file in parts.files:
        answer.files.add(metadata=orjson.dumps(file.metadata).decode(), file_data=file.data)
    return answer


def parse_packet(data: bytes) -> pb.BlockInferencePacket:
    try:
        return pb.BlockInferencePacket.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the message is not {MESSAGE_NAME}") from error


def create_packet_reader(limits: Limits, admission: Admission) -> Callable[[bytes], PacketMessage]:
    """Return a reader of packets that checks large packets before parsing, and leaves huge packets to a thread."""

    def read(data: bytes) -> PacketMessage:
        try:
            if len(data) > LARGE_BYTES:
                admission.check_room(len(data))
                check_files(data, limits)
                if len(data) > HUGE_BYTES:
                    return data
            return parse_packet(data)
        except PenstockError as error:
            return remove_trace(error)

    return read


def check_files(data: bytes, limits: Limits) -> None:
    """Raise RequestTooLarge if a packet that is not parsed yet has too many files or fields."""
    count = 0
    walk = FieldWalk(data, MAX_FIELDS_PER_FILE * limits.max_rows, MESSAGE_NAME)
    for field, kind, start, end in walk.fields(0, len(data)):
        if field == FILES_FIELD and kind == BYTES:
            count += 1
            for _ in walk.fields(start, end):
                pass  # counted by the walk
    if count > limits.max_rows:
        raise RequestTooLarge(
            f"the packet has {count} files, over limits.max_rows ({limits.max_rows}): split the request"
        )
