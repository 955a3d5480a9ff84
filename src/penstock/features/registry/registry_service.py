"""The model registry over gRPC."""
# ruff: noqa: N802 - the names are those of the protocol

import asyncio
from collections.abc import AsyncIterator

import structlog

from penstock.core.errors import InvalidRequest, PenstockError, TooSlow
from penstock.core.principals import Scope
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.guarded_server import Context, get_peer
from penstock.features.registry.manifest import ModelFacts, read_document, read_manifest
from penstock.features.registry.model_registry import ModelRegistry, UploadProgress
from penstock.features.registry.version_records import RegisteredVersion
from penstock.pb.v1 import registry_pb2 as pb
from penstock.pb.v1 import registry_pb2_grpc
from penstock.wire.failures import encode_failure
from penstock.wire.tcp_connections import close_connection

log = structlog.get_logger()
CHUNK_BYTES = 1024 * 1024
SILENCE_S = 60.0  # an upload fails after this time without a byte
READ_S = 60.0  # a client must read each chunk of a download within this time
Messages = AsyncIterator[pb.UploadChunk]


class ModelRegistryService(registry_pb2_grpc.ModelRegistryServicer):
    def __init__(self, registry: ModelRegistry, read_s: float = READ_S) -> None:
        self._registry = registry
        self._read_s = read_s

    @needs_scope(Scope.UPLOAD)
    async def Begin(self, request: pb.BeginUpload, context: Context) -> pb.UploadState:
        facts = read_document(ModelFacts, request.facts or b"{}", "metadata")
        return _to_upload_state(await self._registry.begin(read_manifest(request.manifest), facts))

    @needs_scope(Scope.UPLOAD)
    async def Upload(self, chunks: Messages, context: Context) -> pb.UploadState:
        sent, upload_id = _Chunks(chunks), ""
        while (start := await sent.start()) is not None:
            upload_id = start.upload_id
            await self._registry.append(upload_id, start.sha256, start.offset, sent.data())
        if not upload_id:
            raise InvalidRequest("an upload must begin with the start of a file")
        return _to_upload_state(await self._registry.read_progress(upload_id))

    @needs_scope(Scope.UPLOAD)
    async def Commit(self, request: pb.CommitUpload, context: Context) -> pb.VersionResponse:
        return pb.VersionResponse(version=_to_version(await self._registry.commit(request.upload_id)))

    @needs_scope(Scope.UPLOAD)
    async def Abort(self, request: pb.AbortUpload, context: Context) -> pb.RegistryResponse:
        await self._registry.abort(request.upload_id)
        return pb.RegistryResponse()

    @needs_scope(Scope.UPLOAD, Scope.JOIN)
    async def Find(self, request: pb.FindVersion, context: Context) -> pb.VersionResponse:
        return pb.VersionResponse(version=_to_version(await self._registry.find(request.reference)))

    @needs_scope(Scope.UPLOAD, Scope.JOIN, Scope.METRICS)
    async def List(self, request: pb.ListVersions, context: Context) -> pb.ListResponse:
        return pb.ListResponse(versions=map(_to_version, await self._registry.list(request.model)))

    @needs_scope(Scope.ADMIN)
    async def Delete(self, request: pb.DeleteVersion, context: Context) -> pb.RegistryResponse:
        await self._registry.delete(request.model, request.version)
        return pb.RegistryResponse()

    @needs_scope(Scope.UPLOAD)
    async def SetAlias(self, request: pb.SetAliasRequest, context: Context) -> pb.RegistryResponse:
        await self._registry.set_alias(request.model, request.alias, request.version)
        return pb.RegistryResponse()

    @needs_scope(Scope.UPLOAD, Scope.JOIN)
    async def Download(self, request: pb.DownloadRequest, context: Context) -> None:
        try:
            pieces = self._registry.read(request.sha256, request.offset, is_manifest=request.is_manifest)
            async for piece in pieces:
                for start in range(0, len(piece), CHUNK_BYTES):
                    await self._send_chunk(context, pb.DownloadChunk(data=piece[start : start + CHUNK_BYTES]))
        except PenstockError as error:
            log.warning("download_failed", code=error.code, error=error.message)
            await self._send_chunk(context, pb.DownloadChunk(failure=encode_failure(error)))

    async def _send_chunk(self, context: Context, chunk: pb.DownloadChunk) -> None:
        """Write a chunk. If the client does not read, close its connection: sending an error would block, too."""
        task = asyncio.current_task()
        assert task is not None

        def leave() -> None:
            log.warning("download_not_read", peer=get_peer(context), seconds=self._read_s)
            task.cancel()
            close_connection(context.peer())

        timer = asyncio.get_running_loop().call_later(self._read_s, leave)
        try:
            await context.write(chunk)
        finally:
            timer.cancel()


class _Chunks:
    """Reads the files of an upload stream one after the other."""

    def __init__(self, messages: Messages) -> None:
        self._messages = aiter(messages)
        self._next: pb.UploadChunk | None = None

    async def start(self) -> pb.UploadStart | None:
        """Return the start of the next file, or None if the stream has ended."""
        message, self._next = self._next or await self._receive(), None
        if message is None:
            return None
        if message.WhichOneof("content") != "start":
            raise InvalidRequest("the start of a file must come before its bytes")
        return message.start

    async def data(self) -> AsyncIterator[bytes]:
        while (message := await self._receive()) is not None:
            if message.WhichOneof("content") == "start":
                self._next = message
                return
            yield message.data

    async def _receive(self) -> pb.UploadChunk | None:
        try:
            return await asyncio.wait_for(anext(self._messages, None), SILENCE_S)
        except TimeoutError:
            problem = (
                f"no data came for {SILENCE_S:g} s; send the request again, and the upload continues where it stopped"
            )
            raise TooSlow(problem, reason="incomplete") from None


def _to_upload_state(progress: UploadProgress) -> pb.UploadState:
    files = [
        pb.FileOffset(sha256=sha256, offset=progress.offsets[sha256], size_bytes=size)
        for sha256, size in progress.manifest.blobs.items()
    ]
    return pb.UploadState(upload_id=progress.upload_id, files=files, is_committed=progress.is_committed)


def _to_version(found: RegisteredVersion) -> pb.ModelVersion:
    record = found.record
    return pb.ModelVersion(
        model=found.model,
        version=found.version,
        digest=record.digest,
        size_bytes=record.size_bytes,
        files=record.files,
        created_at=record.created_at,
        facts=record.facts.model_dump_json(exclude_none=True).encode(),
        aliases=found.aliases,
        blocks=found.blocks,
    )
