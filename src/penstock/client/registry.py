"""The client of a model registry; it continues interrupted uploads and downloads."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from penstock.client import faults
from penstock.core.errors import Corrupted, PenstockError, Unavailable
from penstock.pb.v1 import registry_pb2 as pb
from penstock.pb.v1 import registry_pb2_grpc
from penstock.wire.channels import PLAIN_CHANNELS, Channels
from penstock.wire.failures import decode_failure

if TYPE_CHECKING:
    from penstock.features.registry.manifest import Manifest, ModelFacts  # in penstock-serve

T = TypeVar("T")
MANAGER_ADDRESS = "127.0.0.1:7400"
CALL_S = 60.0  # for a call that transfers no files
COMMIT_S = 600.0  # a commit may copy files to another store
STALL_S = 30.0  # the connection is closed after this time without a byte
GIVE_UP_S = 120.0  # the transfer fails after this time without a byte, over all attempts
REACH_S = 5.0  # the transfer fails after this time if no manager has answered at all
CHUNK_BYTES = 1024 * 1024
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
# Reasons of errors after which another attempt may succeed, because it first asks for the offsets of the files.
RETRYABLE_REASONS = ("offset", "incomplete", "unknown_upload")
OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 32 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
)

OnProgress = Callable[[int], None]  # called with the number of transferred bytes


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A version of a model in the registry."""

    model: str
    version: str
    digest: str
    size_bytes: int
    files: int
    created_at: str
    facts: Mapping[str, Any]
    aliases: tuple[str, ...]
    blocks: tuple[str, ...]


@dataclass(slots=True)
class _Stall:
    """Decides how long a stalled upload or download is retried."""

    give_up_s: float
    since: float = field(default_factory=time.monotonic)
    backoff_s: float = FIRST_BACKOFF_S
    corrupted: int = 0

    def reset(self) -> None:
        self.since, self.backoff_s = time.monotonic(), FIRST_BACKOFF_S

    async def wait_after(self, error: PenstockError) -> None:
        """Wait before the next attempt; raise `error` if another attempt would not help."""
        if isinstance(error, Corrupted):
            self.corrupted += 1
        may_try = error.is_retryable or error.reason in RETRYABLE_REASONS or self.corrupted == 1
        if not may_try or time.monotonic() - self.since > self.give_up_s:
            raise error
        await asyncio.sleep(self.backoff_s)
        self.backoff_s = min(2 * self.backoff_s, MAX_BACKOFF_S)


class RegistryClient:
    """A client for one event loop; use it as an async context manager.

    If several addresses are given and a manager does not answer, the next address is tried.
    """

    def __init__(
        self, addresses: str = MANAGER_ADDRESS, give_up_s: float = GIVE_UP_S, channels: Channels = PLAIN_CHANNELS
    ) -> None:
        """Prepare a client; `addresses` are HOST:PORT of one or more managers, separated by commas.

        A transfer fails if no byte arrives for `give_up_s` over all attempts.
        """
        self._opening = channels
        self._give_up_s = give_up_s
        is_target = addresses.startswith(("unix:", "ipv4:", "ipv6:", "dns:"))  # a gRPC target, which may contain commas
        parts = [addresses] if is_target else addresses.split(",")
        self._addresses = [address.strip() for address in parts if address.strip()]
        self._open_channel()

    async def __aenter__(self) -> "RegistryClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    # --- versions

    async def push(
        self,
        manifest: "Manifest",
        files: Mapping[str, Path],
        facts: "ModelFacts | None" = None,
        on_progress: OnProgress = lambda _: None,
    ) -> ModelVersion:
        """Upload the files that the registry does not have, and register the version.

        `files` are the paths by SHA-256. An interrupted upload is continued.
        """
        stall = _Stall(min(REACH_S, self._give_up_s))
        metadata = facts.model_dump_json(exclude_none=True) if facts is not None else "{}"
        begin = pb.BeginUpload(manifest=manifest.encoded, facts=metadata.encode())
        while True:
            try:
                state = await self._call("Begin", begin)
                stall.give_up_s = self._give_up_s  # the address of a manager that has answered
                if state.is_committed:
                    return await self.find(f"{manifest.model}:{manifest.version}")
                if any(file.offset < file.size_bytes for file in state.files):
                    await self._send_files(state, files, stall, on_progress)
                made = await self._call("Commit", pb.CommitUpload(upload_id=state.upload_id), COMMIT_S)
                return _decode_version(made.version)
            except PenstockError as error:
                await stall.wait_after(error)
                await self._try_next(error)

    async def find(self, reference: str) -> ModelVersion:
        """Return the version with the reference NAME, NAME:VERSION or NAME@ALIAS."""
        found = await self._call("Find", pb.FindVersion(reference=reference))
        return _decode_version(found.version)

    async def list(self, model: str = "") -> "list[ModelVersion]":
        """Return the versions of a model, or of all models."""
        return [_decode_version(each) for each in (await self._call("List", pb.ListVersions(model=model))).versions]

    async def delete(self, model: str, version: str) -> None:
        await self._call("Delete", pb.DeleteVersion(model=model, version=version))

    async def set_alias(self, model: str, alias: str, version: str) -> None:
        """Point the alias to a version; an empty `version` deletes the alias."""
        await self._call("SetAlias", pb.SetAliasRequest(model=model, alias=alias, version=version))

    # --- files

    async def read(self, sha256: str, offset: int = 0, *, is_manifest: bool = False) -> AsyncIterator[bytes]:
        """Yield a file's bytes from `offset` on; continue if the connection breaks. The caller checks the SHA-256."""
        stall = _Stall(self._give_up_s)
        while True:
            try:
                request = pb.DownloadRequest(sha256=sha256, offset=offset, is_manifest=is_manifest)
                async for piece in self._download(request):
                    offset += len(piece)
                    stall.reset()
                    yield piece
                return
            except PenstockError as error:
                await stall.wait_after(error)
                await self._try_next(error)

    async def _download(self, request: pb.DownloadRequest) -> AsyncIterator[bytes]:
        call = self._stub.Download(request)
        try:
            while True:
                message = await self._await_call(call.read(), STALL_S)
                if message is grpc.aio.EOF:
                    return
                if message.HasField("failure"):
                    raise decode_failure(message.failure)
                yield message.data
        finally:
            call.cancel()

    async def _send_files(
        self, state: pb.UploadState, files: Mapping[str, Path], stall: _Stall, on_progress: OnProgress
    ) -> None:
        done = sum(file.offset for file in state.files)
        progress_at = time.monotonic()

        async def chunks() -> AsyncIterator[pb.UploadChunk]:
            nonlocal done, progress_at
            for file in state.files:
                if file.offset >= file.size_bytes:
                    continue
                start = pb.UploadStart(upload_id=state.upload_id, sha256=file.sha256, offset=file.offset)
                yield pb.UploadChunk(start=start)
                async for piece in _read_pieces(files[file.sha256], file.offset, file.size_bytes):
                    yield pb.UploadChunk(data=piece)
                    done += len(piece)
                    progress_at = time.monotonic()
                    stall.reset()
                    on_progress(done)

        on_progress(done)
        call = self._stub.Upload(chunks())
        answer = asyncio.ensure_future(self._await_call(call, None))
        try:
            while not (await asyncio.wait({answer}, timeout=1.0))[0]:
                if time.monotonic() - progress_at > STALL_S:
                    raise Unavailable(f"the upload made no progress for {STALL_S:g} s; try again")
            response = answer.result()
        finally:
            answer.cancel()
            call.cancel()
        if response.HasField("failure"):
            raise decode_failure(response.failure)

    async def _call(self, method: str, request: Any, timeout_s: float = CALL_S) -> Any:
        """Make a call; try every manager once before failing."""
        for is_last in (*[False] * (len(self._addresses) - 1), True):
            try:
                return await self._call_one(method, request, timeout_s)
            except Unavailable as error:
                if is_last:
                    raise
                await self._try_next(error)
        raise AssertionError("the last attempt raises")

    async def _call_one(self, method: str, request: Any, timeout_s: float) -> Any:
        response = await self._await_call(getattr(self._stub, method)(request, timeout=timeout_s), None)
        if response.HasField("failure"):
            raise decode_failure(response.failure)
        return response

    async def _await_call(self, call: Awaitable[T], timeout_s: float | None) -> T:
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise Unavailable(f"{self._addresses[0]} sent no data for {timeout_s:g} s; try again later") from None
        except grpc.aio.AioRpcError as error:
            raise _convert_error(error, self._addresses[0]) from error

    async def _try_next(self, error: PenstockError) -> None:
        """Connect to the next manager if this manager is unavailable; all managers of a cluster share one registry."""
        if isinstance(error, Unavailable) and len(self._addresses) > 1:
            await self._channel.close()
            self._addresses.append(self._addresses.pop(0))
            self._open_channel()

    def _open_channel(self) -> None:
        self._channel = self._opening.open(self._addresses[0], OPTIONS)
        self._stub = registry_pb2_grpc.ModelRegistryStub(self._channel)


async def _read_pieces(file: Path, offset: int, size_bytes: int) -> AsyncIterator[bytes]:
    """Yield the file's bytes up to the size in the manifest; the registry detects a changed file by its SHA-256."""
    opened = await asyncio.to_thread(file.open, "rb")
    with opened:
        opened.seek(offset)
        while offset < size_bytes:
            piece = await asyncio.to_thread(opened.read, min(CHUNK_BYTES, size_bytes - offset))
            if not piece:
                return
            offset += len(piece)
            yield piece


def _convert_error(error: grpc.aio.AioRpcError, address: str) -> PenstockError:
    if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED):
        return Unavailable(f"the connection to {address} was interrupted: {error.details()}")
    return faults.convert_manager_error(error, address)


def _decode_version(message: pb.ModelVersion) -> ModelVersion:
    return ModelVersion(
        message.model,
        message.version,
        message.digest,
        message.size_bytes,
        message.files,
        message.created_at,
        json.loads(message.facts or b"{}"),
        tuple(message.aliases),
        tuple(message.blocks),
    )
