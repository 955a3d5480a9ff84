"""The Open Inference Protocol over gRPC: its methods, what each needs, and what is around each."""
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

from penstock.access.guard import Guard, needs_scope
from penstock.access.showing import Shown
from penstock.core.config import Limits
from penstock.core.errors import BUG, InternalError, InvalidRequest, PenstockError, RequestTooLarge, without_trace
from penstock.core.principals import ANY_SCOPE, ANYBODY, CHANGING, INFERRING, SEEING, Needs, Principal
from penstock.core.requests import InferRequest, InferResponse
from penstock.gateway import model_config, statuses
from penstock.gateway.catalogue import EXTENSIONS, SERVER_NAME, Catalogue
from penstock.gateway.grpc.oip_codec import decode_request, decode_typed, encode_response, find_targets
from penstock.gateway.grpc.oip_wire import TypedMessage, find_contents
from penstock.gateway.grpc.traffic import GrpcTraffic
from penstock.gateway.large import HUGE_BYTES, LARGE_BYTES, LargeMessages
from penstock.gateway.shared_memory.region import NO_TARGETS, Targets
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.streams.stream import FINAL, RequestStream
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.serving.admission import Admission
from penstock.serving.serve import Serving
from penstock.wire.credentials.names import names_of_call

log = structlog.get_logger()
Context: TypeAlias = grpc.aio.ServicerContext
# A client that matches answers by id may ask for them as they come, out of order.
UNORDERED = "penstock-unordered"
# One that wants whole answers, also of models that would give them in parts, may say so.
SINGLE = "penstock-single"
# What readers make of a message: themselves where they may not parse it, an error where it cannot be parsed. gRPC
# itself would answer that with UNKNOWN, and never end the stream.
InferMessage: TypeAlias = pb.ModelInferRequest | TypedMessage | PenstockError
NO_MESSAGE = pb.ModelInferRequest()


class OipGrpc:
    def __init__(
        self,
        serving: Serving,
        catalogue: Catalogue,
        guard: Guard,
        memory: SharedMemory | None = None,
        large: LargeMessages | None = None,
    ) -> None:
        self.guard = guard
        self._serving = serving
        self._catalogue = catalogue
        self._memory = memory
        self._large = large or LargeMessages(Limits())
        self.traffic = GrpcTraffic(serving.admission)
        self.unnamed = ""  # whom calls are from that came through the native front to the server behind it

    def admit(self, context: Context, needs: Needs) -> Principal:
        """Raises where the guard does."""
        certificate = names_of_call(context.auth_context()) if self.guard.reads_certificates else ()
        shown = Shown.of_metadata(context.invocation_metadata() or (), certificate)
        try:
            return self.guard.admit(shown, needs, time.time())
        except PenstockError as error:
            self._serving.turned_away("grpc", error)
            raise

    @needs_scope(*INFERRING)
    async def ModelInfer(self, message: InferMessage, context: Context, principal: Principal) -> pb.ModelInferResponse:
        if type(message) is not pb.ModelInferRequest:
            message, request, targets = await self._decode_typed(message, context, principal, "grpc")
        else:
            request, targets = self._decode(message, context, principal, "grpc")
        response = await self._serving.serve(request)
        if request.standings:
            context.set_trailing_metadata(tuple(statuses.limit_headers(request.standings).items()))
        size_bytes = sum([len(tensor.data) for tensor in response.outputs])
        if size_bytes > LARGE_BYTES:
            self.traffic.hold_answer(context, size_bytes)
        return encode_response(response, message, targets)

    @needs_scope(*INFERRING)
    async def ModelStreamInfer(
        self, messages: AsyncIterator[InferMessage], context: Context, principal: Principal
    ) -> None:
        said = dict(context.invocation_metadata() or ())
        admit = partial(self._admit_again, context)
        stream: RequestStream[pb.ModelStreamInferResponse] = RequestStream(
            self._serving, UNORDERED not in said, "grpc-stream", admit, SINGLE in said
        )
        try:
            await stream.run(self._exchanges(context), context.write)
        except grpc.aio.InternalError as error:  # an answer was on its way when the client left
            raise asyncio.CancelledError from error

    def _admit_again(self, context: Context) -> Principal:
        return ANYBODY if self.guard.is_open else self.admit(context, INFERRING)

    async def _exchanges(self, context: Context) -> "AsyncIterator[_GrpcExchange]":
        """Raises where their sender is admitted no more."""
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
            del message, asked  # the next may be long in coming

    async def _decode_typed(
        self, message: InferMessage, context: Context, principal: Principal, protocol: str
    ) -> tuple[pb.ModelInferRequest, InferRequest, Targets]:
        """What `_decode` gives, of a message that is not parsed yet; and what of it is needed for the answer."""
        try:
            if not isinstance(message, TypedMessage):
                raise message if isinstance(message, PenstockError) else InvalidRequest("an unknown message")
            parse = partial(decode_typed, message, protocol, self._memory_of(principal), self._large.limits)
            rest, request, targets = await self._large.decode(len(message.data), parse)
        except PenstockError as error:
            self._serving.turned_away(protocol, error)
            raise
        self._add_context(request, context, principal)
        return rest, request, targets

    def _decode(
        self, message: pb.ModelInferRequest, context: Context, principal: Principal, protocol: str
    ) -> tuple[InferRequest, Targets]:
        """The request, and where its outputs go that are not sent."""
        memory = self._memory_of(principal)
        try:
            request = decode_request(message, protocol, memory, self._large.limits)
            targets = find_targets(message, memory) if message.outputs else NO_TARGETS
        except PenstockError as error:
            self._serving.turned_away(protocol, error)
            raise
        self._add_context(request, context, principal)
        return request, targets

    def _memory_of(self, principal: Principal) -> SharedMemory | None:
        return self._memory if self._memory is None or not principal.key_id else self._memory.of(principal.key_id)

    def _add_context(self, request: InferRequest, context: Context, principal: Principal) -> None:
        request.principal = principal
        request.timeout_s = context.time_remaining()
        request.client = context.peer()[5:].rpartition(":")[0] or self.unnamed
        if self._serving.is_traced:
            found = dict(context.invocation_metadata() or ()).get("traceparent", "")
            request.traceparent = found if isinstance(found, str) else ""

    @needs_scope()
    async def ServerLive(self, message: pb.ServerLiveRequest, principal: Principal) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    @needs_scope()
    async def ServerReady(self, message: pb.ServerReadyRequest, principal: Principal) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._catalogue.is_server_ready())

    @needs_scope(*SEEING)
    async def ModelReady(self, message: pb.ModelReadyRequest, principal: Principal) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._catalogue.is_model_ready(message.name, message.version, principal))

    @needs_scope(*ANY_SCOPE)
    async def ServerMetadata(
        self, message: pb.ServerMetadataRequest, principal: Principal
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(
            name=SERVER_NAME, version=self._catalogue.server_version, extensions=EXTENSIONS
        )

    @needs_scope(*SEEING)
    async def ModelMetadata(self, message: pb.ModelMetadataRequest, principal: Principal) -> pb.ModelMetadataResponse:
        block = await self._catalogue.block(message.name, message.version, principal)
        return model_config.metadata(block, self._catalogue.resolver.versions(message.name, principal))

    @needs_scope(*SEEING)
    async def ModelConfig(self, message: pb.ModelConfigRequest, principal: Principal) -> pb.ModelConfigResponse:
        block = await self._catalogue.block(message.name, message.version, principal)
        return pb.ModelConfigResponse(config=model_config.model_config(block))

    @needs_scope(*SEEING)
    async def ModelStatistics(
        self, message: pb.ModelStatisticsRequest, principal: Principal
    ) -> pb.ModelStatisticsResponse:
        found = await self._catalogue.statistics(message.name, message.version, principal)
        return pb.ModelStatisticsResponse(model_stats=[model_config.statistics(block) for block in found])

    @needs_scope(*SEEING)
    async def RepositoryIndex(
        self, message: pb.RepositoryIndexRequest, principal: Principal
    ) -> pb.RepositoryIndexResponse:
        return model_config.index(self._catalogue.resolver.views(principal), message.ready)

    @needs_scope(*CHANGING)
    async def RepositoryModelLoad(
        self, message: pb.RepositoryModelLoadRequest, principal: Principal
    ) -> pb.RepositoryModelLoadResponse:
        if message.parameters:
            raise InvalidRequest("load takes no parameters: change model.yaml in the repository instead")
        await self._catalogue.load(message.model_name, principal)
        return pb.RepositoryModelLoadResponse()

    @needs_scope(*CHANGING)
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
        encoded.parameters[FINAL].bool_param = response.is_final  # on every answer, as Triton does
        size_bytes = sum([len(tensor.data) for tensor in response.outputs])
        return pb.ModelStreamInferResponse(infer_response=encoded), size_bytes

    def refuse(self, error: PenstockError) -> tuple[pb.ModelStreamInferResponse, int]:
        failed = pb.ModelInferResponse(model_name=self.message.model_name, id=self.message.id)
        failed.parameters["penstock-code"].string_param = error.code
        for name, value in statuses.details(error).items():
            if isinstance(value, str):
                failed.parameters[name].string_param = value
            else:
                failed.parameters[name].double_param = value
        failed.parameters[FINAL].bool_param = True
        return pb.ModelStreamInferResponse(error_message=statuses.told(error), infer_response=failed), 0


def received(answer: Callable[..., Awaitable[Any]], traffic: GrpcTraffic) -> Callable[..., Awaitable[Any]]:
    """Awaits the one message of a call, which gRPC would do unseen."""

    async def answer_received(_: object, context: Context, principal: Principal) -> Any:
        traffic.running += 1
        try:
            message = await traffic.message(context)
            if message is grpc.aio.EOF:
                raise InvalidRequest("the call has no message")
            return await answer(message, context, principal)
        finally:
            traffic.running -= 1

    return answer_received


def guarded(name: str, answer: Callable[..., Awaitable[Any]], edge: OipGrpc, needs: Needs) -> Callable[..., Any]:
    """Answers whom the guard admits, before any message is awaited, and makes errors statuses, whatever the method:
    gRPC would say UNKNOWN, and tell the caller what was raised."""
    guard = edge.guard

    async def answer_or_abort(message: Any, context: Context) -> Any:
        try:
            principal = ANYBODY if guard.is_open else edge.admit(context, needs)
            return await answer(message, context, principal)
        except PenstockError as error:
            refusal = refusal_of(error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("bug", where="grpc", method=name)
            refusal = refusal_of(InternalError(BUG))
        # The context keeps what abort raises, and that keeps this frame: the message must not be in it any more, nor in
        # those of an error that is being handled.
        del message
        try:
            return await context.abort(*refusal)
        except grpc.aio.InternalError as gone:  # the client left meanwhile: gRPC would log a traceback
            raise asyncio.CancelledError from gone

    return answer_or_abort


def refusal_of(error: PenstockError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    told = statuses.told(error).encode(errors="replace").decode()  # what is no text would leave the call unanswered
    return statuses.grpc_code(error), told, tuple(statuses.headers(error).items())


def infer_reader(limits: Limits, admission: Admission) -> Callable[[bytes], InferMessage]:
    """Parses what is small, or has its tensors in raw bytes; what is large is looked over first, and what is huge is
    for a thread also to copy."""
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
            return without_trace(error)

    return read


def control_reader(parse: Callable[[bytes], Any], max_bytes: int) -> Callable[[bytes], Any]:
    """Parses what methods take that infer nothing, and so need little."""

    def read(data: bytes) -> Any:
        if len(data) > max_bytes:
            return RequestTooLarge(f"the message is over limits.max_control_bytes ({max_bytes}): send less")
        try:
            return parse(data)
        except DecodeError:
            return InvalidRequest("the message cannot be parsed as what this method takes")

    return read


def understood(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Raises what a reader has made of a message that it could not read."""

    async def answer_readable(message: Any, context: Context, principal: Principal) -> Any:
        if isinstance(message, PenstockError):
            raise message
        return await answer(message, context, principal)

    return answer_readable
