"""The Open Inference Protocol over gRPC."""

import asyncio
from collections.abc import AsyncIterator
from typing import NoReturn, TypeAlias

import grpc
import structlog

from penstock.core.blocks import BlockState
from penstock.core.errors import InternalError, InvalidRequest, PenstockError
from penstock.core.requests import InferRequest
from penstock.gateway import model_config, statuses
from penstock.gateway.catalogue import SERVER_NAME, Catalogue
from penstock.gateway.codec import decode_request, encode_response
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc
from penstock.serving.serve import Serving

log = structlog.get_logger()
Context: TypeAlias = grpc.aio.ServicerContext
# Requests of one stream that are inside at once; beyond it the stream is not read further.
STREAM_WINDOW = 256
# A client that matches answers by id may ask for them as they come, out of order.
UNORDERED = "penstock-unordered"
# Stands for a message that could not be parsed: gRPC itself would answer UNKNOWN, and never end the stream.
UNREADABLE = pb.ModelInferRequest()


class OipGrpc(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, serving: Serving, catalogue: Catalogue) -> None:
        self._serving = serving
        self._catalogue = catalogue

    async def ModelInfer(self, message: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:  # noqa: N802
        try:
            if message is UNREADABLE:
                raise InvalidRequest("the message is not an inference.ModelInferRequest")
            request = self._decode(message, "grpc")
            request.timeout_s = context.time_remaining()
            self._join_trace(request, context)
            return encode_response(await self._serving.serve(request), message)
        except PenstockError as error:
            return await abort(context, error)

    async def ModelStreamInfer(  # noqa: N802
        self, messages: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        is_ordered = UNORDERED not in dict(context.invocation_metadata() or ())
        answers: asyncio.Queue[asyncio.Task[pb.ModelStreamInferResponse] | None] = asyncio.Queue(STREAM_WINDOW + 1)
        window = asyncio.Semaphore(STREAM_WINDOW)
        reader = asyncio.create_task(self._read_stream(messages, context, answers, window, is_ordered))
        try:
            while (answer := await answers.get()) is not None:
                yield await answer
                window.release()
            await reader
        finally:
            reader.cancel()

    async def _read_stream(
        self,
        messages: AsyncIterator[pb.ModelInferRequest],
        context: Context,
        answers: "asyncio.Queue[asyncio.Task[pb.ModelStreamInferResponse] | None]",
        window: asyncio.Semaphore,
        is_ordered: bool,
    ) -> None:
        """Starts each request as it comes; `answers` gets them in the order in which they shall go out."""
        running: set[asyncio.Task[pb.ModelStreamInferResponse]] = set()
        try:
            async for message in messages:
                await window.acquire()
                task = asyncio.create_task(self._infer_in_stream(message, context))
                running.add(task)
                task.add_done_callback(running.discard)
                if is_ordered:
                    answers.put_nowait(task)
                else:
                    task.add_done_callback(answers.put_nowait)
            if running:
                await asyncio.wait(running)
        finally:
            answers.put_nowait(None)
            for task in running:
                task.cancel()

    async def _infer_in_stream(self, message: pb.ModelInferRequest, context: Context) -> pb.ModelStreamInferResponse:
        try:
            if message is UNREADABLE:
                raise InvalidRequest("the message is not an inference.ModelInferRequest")
            request = self._decode(message, "grpc-stream")
            request.timeout_s = context.time_remaining()
            self._join_trace(request, context)
            return pb.ModelStreamInferResponse(
                infer_response=encode_response(await self._serving.serve(request), message)
            )
        except PenstockError as error:
            failed = pb.ModelInferResponse(model_name=message.model_name, id=message.id)
            failed.parameters["penstock-code"].string_param = error.code
            return pb.ModelStreamInferResponse(error_message=error.message, infer_response=failed)

    def _decode(self, message: pb.ModelInferRequest, protocol: str) -> InferRequest:
        try:
            return decode_request(message, protocol)
        except PenstockError as error:
            self._serving.turned_away(protocol, error)
            raise

    def _join_trace(self, request: InferRequest, context: Context) -> None:
        if self._serving.is_traced:
            found = dict(context.invocation_metadata() or ()).get("traceparent", "")
            request.traceparent = found if isinstance(found, str) else ""

    async def ServerLive(self, message: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:  # noqa: N802
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, message: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:  # noqa: N802
        return pb.ServerReadyResponse(ready=self._catalogue.is_server_ready())

    async def ModelReady(self, message: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:  # noqa: N802
        try:
            return pb.ModelReadyResponse(ready=self._catalogue.is_model_ready(message.name, message.version))
        except PenstockError as error:
            return await abort(context, error)

    async def ServerMetadata(self, message: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:  # noqa: N802
        return pb.ServerMetadataResponse(
            name=SERVER_NAME, version=self._catalogue.server_version, extensions=self._catalogue.extensions
        )

    async def ModelMetadata(self, message: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:  # noqa: N802
        try:
            block = self._catalogue.block(message.name, message.version)
            return model_config.metadata(block, self._catalogue.versions(message.name))
        except PenstockError as error:
            return await abort(context, error)

    async def ModelConfig(self, message: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:  # noqa: N802
        try:
            block = self._catalogue.block(message.name, message.version)
            return pb.ModelConfigResponse(config=model_config.model_config(block))
        except PenstockError as error:
            return await abort(context, error)

    async def ModelStatistics(  # noqa: N802
        self, message: pb.ModelStatisticsRequest, context: Context
    ) -> pb.ModelStatisticsResponse:
        try:
            found = await self._catalogue.statistics(message.name, message.version)
            return pb.ModelStatisticsResponse(model_stats=[model_config.statistics(block) for block in found])
        except PenstockError as error:
            return await abort(context, error)

    async def RepositoryIndex(  # noqa: N802
        self, message: pb.RepositoryIndexRequest, context: Context
    ) -> pb.RepositoryIndexResponse:
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=view.model,
                    version=view.version,
                    state=INDEX_STATES[view.state],
                    reason=view.reason,
                )
                for view in self._catalogue.index()
                if view.state is BlockState.READY or not message.ready
            ]
        )

    async def RepositoryModelLoad(  # noqa: N802
        self, message: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        try:
            if message.parameters:
                raise InvalidRequest("load takes no parameters: change model.yaml in the repository instead")
            await self._catalogue.load(message.model_name)
        except PenstockError as error:
            return await abort(context, error)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(  # noqa: N802
        self, message: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        try:
            await self._catalogue.unload(message.model_name)
        except PenstockError as error:
            return await abort(context, error)
        return pb.RepositoryModelUnloadResponse()


INDEX_STATES = {
    BlockState.READY: "READY",
    BlockState.LOADING: "LOADING",
    BlockState.FAILED: "UNAVAILABLE",
    BlockState.UNLOADED: "UNAVAILABLE",
}


async def abort(context: Context, error: PenstockError) -> NoReturn:
    await context.abort(statuses.grpc_code(error), error.message, tuple(statuses.headers(error).items()))
    raise InternalError("abort returned")
