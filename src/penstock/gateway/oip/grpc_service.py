"""The Open Inference Protocol over gRPC: its methods, their required scopes, and the wrappers around each method."""
# ruff: noqa: N802 - the names are those of the protocol

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from penstock.core.config import SERVER_NAME, Limits
from penstock.core.errors import (
    BUG_MESSAGE,
    InternalError,
    InvalidRequest,
    PenstockError,
    RequestTooLarge,
    remove_trace,
)
from penstock.core.principals import ADMIN_SCOPES, ANY_SCOPE, ANYBODY, INFERENCE_SCOPES, VIEW_SCOPES, Needs, Principal
from penstock.core.requests import InferRequest, InferResponse
from penstock.endpoints import statuses
from penstock.endpoints.credentials import Credentials
from penstock.endpoints.edge_identity import read_metadata_identity
from penstock.endpoints.grpc.grpc_traffic import GrpcTraffic
from penstock.endpoints.guard import Guard, needs_scope
from penstock.endpoints.large_messages import HUGE_BYTES, LARGE_BYTES, LargeMessagePool
from penstock.gateway.catalogue import EXTENSIONS, Catalogue
from penstock.gateway.oip import model_config
from penstock.gateway.oip.grpc_codec import (
    SerializedResponse,
    decode_request,
    decode_typed,
    encode_response,
    find_targets,
    serialize_response,
)
from penstock.gateway.oip.message_size import TypedMessage, find_contents
from penstock.gateway.shared_memory.region import NO_TARGETS, Targets
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.websocket.request_stream import FINAL_PARAMETER, RequestStream
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.serving.admission import Admission
from penstock.serving.serve import Serving
from penstock.wire.credentials.certificate_names import read_call_names

log = structlog.get_logger()
Context: TypeAlias = grpc.aio.ServicerContext
# Metadata of a client that matches answers by id, and wants each answer as soon as it is ready.
UNORDERED_HEADER = "penstock-unordered"
# Metadata of a client that wants one whole answer per request, also from models that can answer in parts.
SINGLE_HEADER = "penstock-single"
# The result of reading a message: parsed, still unparsed because it is large, or an error. If the reader raised, gRPC
# would answer with UNKNOWN, and never end the stream.
InferMessage: TypeAlias = pb.ModelInferRequest | TypedMessage | PenstockError
NO_MESSAGE = pb.ModelInferRequest()


class OipGrpc:
    def __init__(
        self,
        serving: Serving,
        catalogue: Catalogue,
        guard: Guard,
        memory: SharedMemory | None = None,
        large: LargeMessagePool | None = None,
        is_behind_edge: bool = False,
    ) -> None:
        """Create the service. `is_behind_edge`: all calls come from the edge, with clients' identities in metadata."""
        self.guard = guard
        self._serving = serving
        self._catalogue = catalogue
        self._memory = memory
        self._large = large or LargeMessagePool(Limits())
        self.admission = serving.admission
        self.is_behind_edge = is_behind_edge
        self.traffic = GrpcTraffic(self.admission, self._peer_of, is_behind_edge)
        self.default_client = ""  # the client address of calls that the native server forwards to the grpcio server

    def admit(self, context: Context, needs: Needs) -> Principal:
        """Return the caller, or raise Unauthenticated or Forbidden."""
        metadata = context.invocation_metadata() or ()
        if not self.guard.reads_certificates:
            certificate: tuple[str, ...] = ()
        elif self.is_behind_edge:
            certificate = read_metadata_identity(metadata).certificate
        else:
            certificate = read_call_names(context.auth_context())
        shown = Credentials.from_metadata(metadata, certificate)
        try:
            return self.guard.admit(shown, needs, time.time())
        except PenstockError as error:
            self._serving.count_rejected("grpc", error)
            raise

    def _peer_of(self, context: Context) -> str:
        return (
            read_metadata_identity(context.invocation_metadata() or ()).peer if self.is_behind_edge else context.peer()
        )

    @needs_scope(*INFERENCE_SCOPES)
    async def ModelInfer(
        self, message: InferMessage, context: Context, principal: Principal
    ) -> pb.ModelInferResponse | SerializedResponse:
        if type(message) is not pb.ModelInferRequest:
            message, request, targets = await self._decode_typed(message, context, principal, "grpc")
        else:
            request, targets = self._decode(message, context, principal, "grpc")
        response = await self._serving.serve(request)
        if request.limit_statuses:
            context.set_trailing_metadata(tuple(statuses.make_limit_headers(request.limit_statuses).items()))
        del request  # frees its tensors before the answer is copied
        size_bytes = sum([len(tensor.data) for tensor in response.outputs])
        if size_bytes > LARGE_BYTES:
            self.traffic.hold_answer(context, size_bytes)
        if size_bytes > HUGE_BYTES:
            return serialize_response(response, message, targets)
        return encode_response(response, message, targets)

    @needs_scope(*INFERENCE_SCOPES)
    async def ModelStreamInfer(
        self, messages: AsyncIterator[InferMessage], context: Context, principal: Principal
    ) -> None:
        metadata = dict(context.invocation_metadata() or ())
        admit = partial(self._admit_again, context)
        stream: RequestStream[pb.ModelStreamInferResponse] = RequestStream(
            self._serving, UNORDERED_HEADER not in metadata, "grpc-stream", admit, SINGLE_HEADER in metadata
        )
        try:
            await stream.run(self._read_exchanges(context), context.write)
        except grpc.aio.InternalError as error:  # an answer was on its way when the client left
            raise asyncio.CancelledError from error

    def _admit_again(self, context: Context) -> Principal:
        return ANYBODY if self.guard.is_open else self.admit(context, INFERENCE_SCOPES)

    async def _read_exchanges(self, context: Context) -> "AsyncIterator[_GrpcExchange]":
        """Yield the requests of a stream. Raise if the caller's key has expired or was revoked."""
        read = self.traffic.reader(context)
        while (message := await read()) is not grpc.aio.EOF:
            principal = self._admit_again(context)
            asked = message if type(message) is pb.ModelInferRequest else NO_MESSAGE
            try:
                if asked is NO_MESSAGE:
                    asked, request, targets = await self._decode_typed(message, context, principal, "grpc-stream")
                else:
                    request, targets = self._decode(asked, context, principal, "grpc-stream")
            except PenstockError as error:
                yield _GrpcExchange(asked, error, NO_TARGETS, 0)
            else:
                yield _GrpcExchange(asked, request, targets, request.size_bytes)
                del request, targets
            del message, asked  # free them while the next message is awaited

    async def _decode_typed(
        self, message: InferMessage, context: Context, principal: Principal, protocol: str
    ) -> tuple[pb.ModelInferRequest, InferRequest, Targets]:
        """Like `_decode`, for a message that is not parsed yet. Also return the fields needed for the answer."""
        try:
            if not isinstance(message, TypedMessage):
                raise (
                    message if isinstance(message, PenstockError) else InvalidRequest("the message has an unknown type")
                )
            parse = partial(decode_typed, message, protocol, self._get_memory(principal), self._large.limits)
            rest, request, targets = await self._large.decode(len(message.data), parse)
        except PenstockError as error:
            self._serving.count_rejected(protocol, error, InferRequest("", [], principal=principal))
            raise
        self.add_context(request, context, principal)
        return rest, request, targets

    def _decode(
        self, message: pb.ModelInferRequest, context: Context, principal: Principal, protocol: str
    ) -> tuple[InferRequest, Targets]:
        """Return the request, and its outputs that are written to shared memory."""
        memory = self._get_memory(principal)
        try:
            request = decode_request(message, protocol, memory, self._large.limits)
            targets = find_targets(message, memory) if message.outputs else NO_TARGETS
        except PenstockError as error:
            rejected = InferRequest(message.model_name, [], message.model_version, message.id, principal=principal)
            self._serving.count_rejected(protocol, error, rejected)
            raise
        self.add_context(request, context, principal)
        return request, targets

    def _get_memory(self, principal: Principal) -> SharedMemory | None:
        return self._memory if self._memory is None or not principal.key_id else self._memory.for_key(principal.key_id)

    def add_context(self, request: InferRequest, context: Context, principal: Principal) -> None:
        request.principal = principal
        request.timeout_s = context.time_remaining()
        if self.is_behind_edge:
            request.client = read_metadata_identity(context.invocation_metadata() or ()).client[0]
        else:
            request.client = context.peer()[5:].rpartition(":")[0] or self.default_client
        if self._serving.is_traced:
            found = dict(context.invocation_metadata() or ()).get("traceparent", "")
            request.traceparent = found if isinstance(found, str) else ""

    @needs_scope()
    async def ServerLive(self, message: pb.ServerLiveRequest, principal: Principal) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    @needs_scope()
    async def ServerReady(self, message: pb.ServerReadyRequest, principal: Principal) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._catalogue.is_server_ready())

    @needs_scope(*VIEW_SCOPES)
    async def ModelReady(self, message: pb.ModelReadyRequest, principal: Principal) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._catalogue.is_model_ready(message.name, message.version, principal))

    @needs_scope(*ANY_SCOPE)
    async def ServerMetadata(
        self, message: pb.ServerMetadataRequest, principal: Principal
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(
            name=SERVER_NAME, version=self._catalogue.server_version, extensions=EXTENSIONS
        )

    @needs_scope(*VIEW_SCOPES)
    async def ModelMetadata(self, message: pb.ModelMetadataRequest, principal: Principal) -> pb.ModelMetadataResponse:
        block = await self._catalogue.wait_for_block(message.name, message.version, principal)
        return model_config.make_metadata(block, self._catalogue.resolver.list_versions(message.name, principal))

    @needs_scope(*VIEW_SCOPES)
    async def ModelConfig(self, message: pb.ModelConfigRequest, principal: Principal) -> pb.ModelConfigResponse:
        block = await self._catalogue.wait_for_block(message.name, message.version, principal)
        return pb.ModelConfigResponse(config=model_config.make_model_config(block))

    @needs_scope(*VIEW_SCOPES)
    async def ModelStatistics(
        self, message: pb.ModelStatisticsRequest, principal: Principal
    ) -> pb.ModelStatisticsResponse:
        found = await self._catalogue.collect_statistics(message.name, message.version, principal)
        return pb.ModelStatisticsResponse(model_stats=[model_config.make_statistics(block) for block in found])

    @needs_scope(*VIEW_SCOPES)
    async def RepositoryIndex(
        self, message: pb.RepositoryIndexRequest, principal: Principal
    ) -> pb.RepositoryIndexResponse:
        return model_config.make_index(self._catalogue.resolver.list_views(principal), message.ready)

    @needs_scope(*ADMIN_SCOPES)
    async def RepositoryModelLoad(
        self, message: pb.RepositoryModelLoadRequest, principal: Principal
    ) -> pb.RepositoryModelLoadResponse:
        if message.parameters:
            raise InvalidRequest("load takes no parameters: change model.yaml in the repository instead")
        await self._catalogue.load(message.model_name, principal)
        return pb.RepositoryModelLoadResponse()

    @needs_scope(*ADMIN_SCOPES)
    async def RepositoryModelUnload(
        self, message: pb.RepositoryModelUnloadRequest, principal: Principal
    ) -> pb.RepositoryModelUnloadResponse:
        await self._catalogue.unload(message.model_name, principal)
        return pb.RepositoryModelUnloadResponse()


@dataclass(slots=True)
class _GrpcExchange:
    """One request on a stream."""

    message: pb.ModelInferRequest
    request: InferRequest | PenstockError
    targets: Targets
    size_bytes: int

    async def encode(self, response: InferResponse, is_decoupled: bool) -> tuple[pb.ModelStreamInferResponse, int]:
        encoded = encode_response(response, self.message, self.targets)
        encoded.parameters[FINAL_PARAMETER].bool_param = response.is_final  # on every answer, as Triton does
        size_bytes = sum([len(tensor.data) for tensor in response.outputs])
        return pb.ModelStreamInferResponse(infer_response=encoded), size_bytes

    def refuse(self, error: PenstockError) -> tuple[pb.ModelStreamInferResponse, int]:
        failed = pb.ModelInferResponse(model_name=self.message.model_name, id=self.message.id)
        failed.parameters["penstock-code"].string_param = error.code
        for name, value in statuses.make_details(error).items():
            if isinstance(value, str):
                failed.parameters[name].string_param = value
            else:
                failed.parameters[name].double_param = value
        failed.parameters[FINAL_PARAMETER].bool_param = True
        return pb.ModelStreamInferResponse(error_message=statuses.make_public_message(error), infer_response=failed), 0


def wrap_with_message(
    answer: Callable[..., Awaitable[Any]], traffic: GrpcTraffic, may_be_large: bool = True
) -> Callable[..., Awaitable[Any]]:
    """Wrap a method that takes a single message, so that GrpcTraffic and not gRPC reads the message."""

    async def answer_received(_: object, context: Context, principal: Principal) -> Any:
        traffic.running += 1
        try:
            message = await traffic.message(context, may_be_large)
            if message is grpc.aio.EOF:
                raise InvalidRequest("the call has no message")
            return await answer(message, context, principal)
        finally:
            traffic.running -= 1

    return answer_received


def wrap_with_guard(
    name: str, answer: Callable[..., Awaitable[Any]], edge: OipGrpc, needs: Needs
) -> Callable[..., Any]:
    """Wrap a method: check the caller before any message is awaited, and turn errors into statuses.

    gRPC itself would answer with UNKNOWN and the text of the exception.
    """
    guard = edge.guard

    async def answer_or_abort(message: Any, context: Context) -> Any:
        try:
            principal = ANYBODY if guard.is_open else edge.admit(context, needs)
            return await answer(message, context, principal)
        except PenstockError as error:
            refusal = encode_refusal(error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("bug", where="grpc", method=name)
            refusal = encode_refusal(InternalError(BUG_MESSAGE))
        # The context keeps the exception of `abort`, whose traceback keeps this frame. So the message must be deleted
        # here, and no other error may be in handling.
        del message
        try:
            return await context.abort(*refusal)
        except grpc.aio.InternalError as gone:  # the client disconnected; gRPC would log a traceback
            raise asyncio.CancelledError from gone

    return answer_or_abort


def encode_refusal(error: PenstockError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    # gRPC would leave the call unanswered if the message could not be encoded.
    message = statuses.make_public_message(error).encode(errors="replace").decode()
    return statuses.get_grpc_code(error), message, tuple(statuses.make_headers(error).items())


def create_infer_reader(limits: Limits, admission: Admission) -> Callable[[bytes], InferMessage]:
    """Return the reader of inference messages.

    It parses small messages, and large messages with raw tensors after a check. It leaves huge messages, and messages
    with large typed contents, for a thread to parse.
    """
    parse = pb.ModelInferRequest.FromString

    def read(data: bytes) -> InferMessage:
        try:
            if len(data) > LARGE_BYTES:
                admission.check_room(len(data))
                spans = find_contents(data, limits)
                if len(data) > HUGE_BYTES or sum(end - start for start, end in spans) > LARGE_BYTES:
                    return TypedMessage(data, spans)
            return parse(data)
        except DecodeError:
            return InvalidRequest("the message is not an inference.ModelInferRequest")
        except PenstockError as error:
            return remove_trace(error)

    return read


def create_control_reader(parse: Callable[[bytes], Any], max_bytes: int) -> Callable[[bytes], Any]:
    """Return a reader for the messages of methods that do not infer, with a bound on their size."""

    def read(data: bytes) -> Any:
        if len(data) > max_bytes:
            return RequestTooLarge(
                f"the message has {len(data)} bytes; this method takes at most {max_bytes}: send less"
            )
        try:
            return parse(data)
        except DecodeError:
            return InvalidRequest("the message cannot be parsed as this method's request message")

    return read


def wrap_with_readable_message(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap a method so that it raises the error of a message that could not be read."""

    async def answer_readable(message: Any, context: Context, principal: Principal) -> Any:
        if isinstance(message, PenstockError):
            raise message
        return await answer(message, context, principal)

    return answer_readable
