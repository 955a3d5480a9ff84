"""The Open Inference Protocol over gRPC: its methods, and the guard around each."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from penstock.core.error_text import EDGE_COST, shorten
from penstock.core.errors import BUG, InternalError, InvalidRequest, PenstockError
from penstock.core.requests import InferRequest, InferResponse
from penstock.gateway import model_config, statuses
from penstock.gateway.catalogue import EXTENSIONS, SERVER_NAME, Catalogue
from penstock.gateway.grpc.oip_codec import decode_request, encode_response, find_targets
from penstock.gateway.shared_memory.region import NO_TARGETS, Targets
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.streams.stream import FINAL, RequestStream
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc
from penstock.serving.serve import Serving

log = structlog.get_logger()
Context: TypeAlias = grpc.aio.ServicerContext
HOT = "ModelInfer"
# A client that matches answers by id may ask for them as they come, out of order.
UNORDERED = "penstock-unordered"
# Stands for a message that could not be parsed: gRPC itself would answer UNKNOWN, and never end the stream.
UNREADABLE = pb.ModelInferRequest()


class OipGrpc(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, serving: Serving, catalogue: Catalogue, memory: SharedMemory | None = None) -> None:
        self._serving = serving
        self._catalogue = catalogue
        self._memory = memory

    async def ModelInfer(self, message: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:  # noqa: N802
        request, targets = self._decode(message, context, "grpc")
        return encode_response(await self._serving.serve(request), message, targets)

    async def ModelStreamInfer(self, messages: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:  # noqa: N802
        is_ordered = UNORDERED not in dict(context.invocation_metadata() or ())
        stream: RequestStream[pb.ModelInferRequest, pb.ModelStreamInferResponse] = RequestStream(
            self._serving, partial(self._open_exchange, context), is_ordered, "grpc-stream"
        )
        try:
            await stream.run(aiter(messages), context.write)
        except grpc.aio.InternalError as error:  # an answer was on its way when the client left
            raise asyncio.CancelledError from error

    def _open_exchange(self, context: Context, message: pb.ModelInferRequest) -> "_GrpcExchange":
        try:
            request, targets = self._decode(message, context, "grpc-stream")
        except PenstockError as error:
            return _GrpcExchange(message, error, NO_TARGETS, 0)
        return _GrpcExchange(message, request, targets, request.size_bytes)

    def _decode(self, message: pb.ModelInferRequest, context: Context, protocol: str) -> tuple[InferRequest, Targets]:
        """The request, and where its outputs go that are not sent."""
        if message is UNREADABLE:
            raise InvalidRequest("the message is not an inference.ModelInferRequest")
        try:
            request = decode_request(message, protocol, self._memory)
            targets = find_targets(message, self._memory) if message.outputs else NO_TARGETS
        except PenstockError as error:
            self._serving.turned_away(protocol, error)
            raise
        request.timeout_s = context.time_remaining()
        if self._serving.is_traced:
            found = dict(context.invocation_metadata() or ()).get("traceparent", "")
            request.traceparent = found if isinstance(found, str) else ""
        return request, targets

    async def ServerLive(self, message: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:  # noqa: N802
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, message: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:  # noqa: N802
        return pb.ServerReadyResponse(ready=self._catalogue.is_server_ready())

    async def ModelReady(self, message: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:  # noqa: N802
        return pb.ModelReadyResponse(ready=self._catalogue.is_model_ready(message.name, message.version))

    async def ServerMetadata(self, message: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:  # noqa: N802
        return pb.ServerMetadataResponse(
            name=SERVER_NAME, version=self._catalogue.server_version, extensions=EXTENSIONS
        )

    async def ModelMetadata(self, message: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:  # noqa: N802
        block = await self._catalogue.block(message.name, message.version)
        return model_config.metadata(block, self._catalogue.resolver.versions(message.name))

    async def ModelConfig(self, message: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:  # noqa: N802
        block = await self._catalogue.block(message.name, message.version)
        return pb.ModelConfigResponse(config=model_config.model_config(block))

    async def ModelStatistics(  # noqa: N802
        self, message: pb.ModelStatisticsRequest, context: Context
    ) -> pb.ModelStatisticsResponse:
        found = await self._catalogue.statistics(message.name, message.version)
        return pb.ModelStatisticsResponse(model_stats=[model_config.statistics(block) for block in found])

    async def RepositoryIndex(  # noqa: N802
        self, message: pb.RepositoryIndexRequest, context: Context
    ) -> pb.RepositoryIndexResponse:
        return model_config.index(self._catalogue.resolver.views(), message.ready)

    async def RepositoryModelLoad(  # noqa: N802
        self, message: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        if message.parameters:
            raise InvalidRequest("load takes no parameters: change model.yaml in the repository instead")
        await self._catalogue.control.load(message.model_name)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(  # noqa: N802
        self, message: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        await self._catalogue.control.unload(message.model_name)
        return pb.RepositoryModelUnloadResponse()


@dataclass(slots=True)
class _GrpcExchange:
    """One request on a stream."""

    message: pb.ModelInferRequest
    request: InferRequest | PenstockError
    targets: Targets
    size_bytes: int

    def encode(self, response: InferResponse, is_decoupled: bool) -> tuple[pb.ModelStreamInferResponse, int]:
        encoded = encode_response(response, self.message, self.targets)
        encoded.parameters[FINAL].bool_param = response.is_final  # on every answer, as Triton does
        size_bytes = sum([len(tensor.data) for tensor in response.outputs])
        return pb.ModelStreamInferResponse(infer_response=encoded), size_bytes

    def refuse(self, error: PenstockError) -> tuple[pb.ModelStreamInferResponse, int]:
        failed = pb.ModelInferResponse(model_name=self.message.model_name, id=self.message.id)
        failed.parameters["penstock-code"].string_param = error.code
        failed.parameters[FINAL].bool_param = True
        return pb.ModelStreamInferResponse(error_message=error.message, infer_response=failed), 0


def guarded(name: str, answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Makes errors statuses, whatever the method: gRPC would say UNKNOWN, and tell the caller what was raised."""

    async def answer_or_abort(message: Any, context: Context) -> Any:
        try:
            if message is UNREADABLE and name != HOT:  # which looks for itself
                raise InvalidRequest("the message cannot be parsed as what this method takes")
            return await answer(message, context)
        except PenstockError as error:
            await _abort(context, error)
        except Exception:
            log.exception("bug", where="grpc", method=name)
            await _abort(context, InternalError(BUG))

    return answer_or_abort


async def _abort(context: Context, error: PenstockError) -> None:
    await context.abort(
        statuses.grpc_code(error), shorten(error.message, EDGE_COST), tuple(statuses.headers(error).items())
    )


def forgiving(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Makes a message that cannot be parsed the caller's fault: gRPC would say UNKNOWN, and log a traceback."""

    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return UNREADABLE

    return parse_or_mark
