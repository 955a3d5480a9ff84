"""The model registry over REST, on the manager's HTTP door. Files come by tus 1.0: HEAD says how far, PATCH goes on.

A request is never read whole: bodies are streams into the registry, and files are streams out of it.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, cast

import orjson
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from penstock.core.config import Limits
from penstock.core.errors import (
    BUG,
    InternalError,
    InvalidRequest,
    PenstockError,
    RequestTooLarge,
    UnknownModel,
)
from penstock.core.manifest import MAX_MANIFEST_BYTES, VERSION, ModelFacts, make_manifest, read_document
from penstock.core.principals import Needs, Scope, needs
from penstock.gateway import statuses
from penstock.gateway.http.bounded import BoundedProtocol, BoundedServer, Phase
from penstock.gateway.http.doorman import Doorman, certificate_of
from penstock.gateway.http.handshake import secured
from penstock.gateway.turnstile import Turnstile
from penstock.manager.access.door import Acting, acting
from penstock.serving.admission import Admission
from penstock.wire.credentials.certificates import Certificates

if TYPE_CHECKING:
    from penstock.manager.models.records import RegisteredVersion
    from penstock.manager.models.registry import ModelRegistry, UploadProgress

log = structlog.get_logger()
ROOT = "/v1/registry"
VERSION_PATH = ROOT + "/models/{model}/versions/{version}"
FILE_PATH = ROOT + "/uploads/{upload}/files/{sha256}"
TUS = {"tus-resumable": "1.0.0"}
OFFSET_STREAM = "application/offset+octet-stream"
MAX_CONNECTIONS = 256
PIECE_BYTES = 512 * 1024
CLOSE_S = 2
RANGE = re.compile(r"bytes=(?:(?P<first>[0-9]{1,18})-(?P<last>[0-9]{0,18})|-(?P<tail>[0-9]{1,18}))")
Handler = Callable[["RegistryRest", Request], Awaitable[Response]]


class RegistryRest:
    def __init__(self, registry: "ModelRegistry") -> None:
        self._registry = registry

    # --- versions

    async def list(self, request: Request) -> Response:
        found = await self._registry.list(request.path_params.get("model", ""))
        if not found and "model" in request.path_params:
            raise UnknownModel(f"the registry has no model '{request.path_params['model'][:128]}'")
        return _json({"models": [_version(each) for each in found]})

    async def find(self, request: Request) -> Response:
        found = await self._find(request)
        manifest = await self._registry.manifest(found.record.digest)
        return _json({**_version(found), "files": [file.model_dump() for file in manifest.files]})

    async def delete(self, request: Request) -> Response:
        await self._registry.delete(request.path_params["model"], request.path_params["version"])
        return Response(status_code=204)

    async def download(self, request: Request) -> Response:
        manifest = await self._registry.manifest((await self._find(request)).record.digest)
        file = manifest.file(request.path_params["path"])
        if file is None:
            raise UnknownModel(f"the version has no file '{request.path_params['path'][:200]}'")
        first, last = _range(request.headers.get("range", ""), file.size_bytes)
        headers = {"accept-ranges": "bytes", "etag": f'"{file.sha256}"', "content-length": str(last - first)}
        is_part = "range" in request.headers
        if is_part:
            headers["content-range"] = f"bytes {first}-{last - 1}/{file.size_bytes}"
        pieces = self._registry.read(file.sha256, first)
        media = "application/octet-stream"
        return StreamingResponse(_up_to(pieces, last - first), 206 if is_part else 200, headers, media)

    async def set_alias(self, request: Request) -> Response:
        version = (await _document(request)).get("version")
        if not isinstance(version, str) or not version:
            raise InvalidRequest('the body says which version: {"version": "3"}')
        await self._registry.set_alias(request.path_params["model"], request.path_params["alias"], version)
        return Response(status_code=204)

    async def delete_alias(self, request: Request) -> Response:
        await self._registry.set_alias(request.path_params["model"], request.path_params["alias"], "")
        return Response(status_code=204)

    # --- uploads

    async def begin(self, request: Request) -> Response:
        """Begins an upload, or finds it."""
        body = await _document(request)
        if unknown := sorted(body.keys() - {"files", "metadata"}):
            raise InvalidRequest(f"'{unknown[0][:80]}' is not known: there are 'files' and 'metadata'")
        files = body.get("files")
        if isinstance(files, list):
            files.sort(key=lambda file: str(file.get("path", "")) if isinstance(file, dict) else "")
        manifest = make_manifest(request.path_params["model"], request.path_params["version"], files)
        facts = read_document(ModelFacts, orjson.dumps(body.get("metadata") or {}), "metadata")
        progress = await self._registry.begin(manifest, facts)
        headers = {"location": f"{ROOT}/uploads/{progress.upload_id}"}
        return _json(_progress(progress), 200 if progress.is_committed else 201, headers)

    async def progress(self, request: Request) -> Response:
        return _json(_progress(await self._registry.progress(request.path_params["upload"])))

    async def offset(self, request: Request) -> Response:
        progress = await self._registry.progress(request.path_params["upload"])
        sha256 = request.path_params["sha256"]
        if sha256 not in progress.offsets:
            raise InvalidRequest("the upload has no such file")
        told = {"upload-offset": progress.offsets[sha256], "upload-length": progress.manifest.blobs[sha256]}
        return Response(headers={**TUS, "cache-control": "no-store", **{key: str(n) for key, n in told.items()}})

    async def append(self, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != OFFSET_STREAM:
            raise InvalidRequest(f"send content-type: {OFFSET_STREAM}")
        offset = request.headers.get("upload-offset", "")
        if not re.fullmatch("[0-9]{1,18}", offset):
            raise InvalidRequest("send upload-offset: the bytes of the file that are there, as HEAD tells")
        names = request.path_params
        there = await self._registry.append(names["upload"], names["sha256"], int(offset), _pieces(request))
        return Response(status_code=204, headers={**TUS, "upload-offset": str(there)})

    async def commit(self, request: Request) -> Response:
        return _json(_version(await self._registry.commit(request.path_params["upload"])), 201)

    async def abort(self, request: Request) -> Response:
        await self._registry.abort(request.path_params["upload"])
        return Response(status_code=204, headers=TUS)

    async def options(self, request: Request) -> Response:
        return Response(status_code=204, headers={**TUS, "tus-version": "1.0.0", "tus-extension": "termination"})

    async def _find(self, request: Request) -> "RegisteredVersion":
        """By number, or by alias."""
        version = request.path_params["version"]
        mark = ":" if VERSION.fullmatch(version) else "@"
        return await self._registry.find(f"{request.path_params['model']}{mark}{version}")


UPLOADING, DELETING = needs(Scope.UPLOAD), needs(Scope.ADMIN)
READING, LOOKING = needs(Scope.UPLOAD, Scope.JOIN), needs(Scope.UPLOAD, Scope.JOIN, Scope.METRICS)
ROUTES: tuple[tuple[str, str, Needs, Handler], ...] = (
    ("GET", ROOT + "/models", LOOKING, RegistryRest.list),
    ("GET", ROOT + "/models/{model}", LOOKING, RegistryRest.list),
    ("GET", VERSION_PATH, READING, RegistryRest.find),
    ("POST", VERSION_PATH, UPLOADING, RegistryRest.begin),
    ("DELETE", VERSION_PATH, DELETING, RegistryRest.delete),
    ("GET", VERSION_PATH + "/files/{path:path}", READING, RegistryRest.download),
    ("PUT", ROOT + "/models/{model}/aliases/{alias}", UPLOADING, RegistryRest.set_alias),
    ("DELETE", ROOT + "/models/{model}/aliases/{alias}", UPLOADING, RegistryRest.delete_alias),
    ("GET", ROOT + "/uploads/{upload}", UPLOADING, RegistryRest.progress),
    ("DELETE", ROOT + "/uploads/{upload}", UPLOADING, RegistryRest.abort),
    ("POST", ROOT + "/uploads/{upload}/commit", UPLOADING, RegistryRest.commit),
    ("HEAD", FILE_PATH, UPLOADING, RegistryRest.offset),
    ("PATCH", FILE_PATH, UPLOADING, RegistryRest.append),
    ("OPTIONS", FILE_PATH, UPLOADING, RegistryRest.options),
)


class RegistryApp:
    """The application: whoever the doorman lets in."""

    def __init__(self, registry: "ModelRegistry", doorman: Doorman) -> None:
        rest = RegistryRest(registry)
        self._doorman = doorman
        self._app: ASGIApp = Starlette(
            routes=[
                StarletteRoute(path, self._guarded(handler, rest, needed), methods=[method])
                for method, path, needed, handler in ROUTES
            ],
            exception_handlers={PenstockError: _failed, HTTPException: _not_routed, Exception: _bug},
        )

    def _guarded(self, handler: Handler, rest: RegistryRest, needed: Needs) -> Callable[[Request], Awaitable[Response]]:
        async def call(request: Request) -> Response:
            principal = self._doorman.admit(request.scope["headers"], needed, certificate_of(request.scope))
            acting.set(Acting(principal, f"Registry.{handler.__name__}"))
            return await handler(rest, request)

        return call

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._doorman.refusal(scope["headers"], scope["method"])
        if refusal is not None:
            await _error(refusal)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            log.debug("client_left", path=scope["path"][:200])


class RegistryProtocol(BoundedProtocol):
    """A body is not held, but written as it comes: it may have any size, and take as long as it moves."""

    def hold(self, size: int) -> bool:
        return self._phase is not Phase.REFUSED

    def body_of(self, error: PenstockError) -> object:
        return _told(error)


def serve_registry(
    app: RegistryApp, opened: socket.socket, limits: Limits, certificates: Certificates
) -> Callable[[], Awaitable[None]]:
    """Returns what closes it."""
    limits = limits.model_copy(update={"message_timeout_s": inf})
    turnstile = Turnstile(limits, Admission(limits), _turned_away, MAX_CONNECTIONS)
    server = BoundedServer(
        uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], secured(partial(RegistryProtocol, turnstile), turnstile, certificates)),
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_S,
            ws="none",
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[opened]), name="registry-door")

    async def close() -> None:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=2 * CLOSE_S)

    return close


def _turned_away(error: PenstockError) -> None:
    log.info("turned_away", code=error.code, error=statuses.told(error))


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes, in pieces that are worth a write; what came before it was cut is not lost."""
    stream = request.stream()
    held = bytearray()
    failure: ClientDisconnect | None = None
    is_over = False
    while not is_over:
        try:
            piece = await anext(stream, b"")
            is_over = not piece
            held += piece
        except ClientDisconnect as error:
            failure = error
        if held and (is_over or failure is not None or len(held) >= PIECE_BYTES):
            yield bytes(held)
            held.clear()
        if failure is not None:
            raise failure


async def _document(request: Request) -> dict[str, Any]:
    body = b""
    async for piece in _pieces(request):
        body += piece
        if len(body) > MAX_MANIFEST_BYTES:
            raise RequestTooLarge(f"the body is over {MAX_MANIFEST_BYTES} bytes")
    try:
        document = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidRequest("the body is not a JSON object")
    return document


async def _up_to(pieces: AsyncIterator[bytes], left: int) -> AsyncIterator[bytes]:
    if not left:
        return
    async for piece in pieces:
        yield piece[:left]
        left -= len(piece)
        if left <= 0:
            return


def _range(header: str, size: int) -> tuple[int, int]:
    """The first byte, and the one behind the last."""
    if not header:
        return 0, size
    found = RANGE.fullmatch(header)
    if found is None:
        raise HTTPException(416, f"one range of bytes, not '{header[:80]}'", {"content-range": f"bytes */{size}"})
    if found["tail"]:
        first, last = max(0, size - int(found["tail"])), size
    else:
        first, last = int(found["first"]), min(int(found["last"]) + 1, size) if found["last"] else size
    if first >= last:
        raise HTTPException(416, f"the file has {size} bytes", {"content-range": f"bytes */{size}"})
    return first, last


def _version(found: "RegisteredVersion") -> dict[str, Any]:
    record = found.record
    return {
        "model": found.model,
        "version": found.version,
        "digest": record.digest,
        "size_bytes": record.size_bytes,
        "file_count": record.files,
        "created_at": record.created_at,
        "aliases": found.aliases,
        "blocks": found.blocks,
        "metadata": record.facts.model_dump(exclude_none=True),
    }


def _progress(progress: "UploadProgress") -> dict[str, Any]:
    files = [
        {"sha256": sha256, "size_bytes": size, "offset": progress.offsets[sha256]}
        for sha256, size in progress.manifest.blobs.items()
    ]
    return {"upload": progress.upload_id, "is_committed": progress.is_committed, "files": files}


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")


def _error(error: PenstockError) -> Response:
    headers = statuses.headers(error)
    if error.reason == "offset":
        headers |= {**TUS, "upload-offset": error.fields.get("offset", "")}
    return _json(_told(error), statuses.http_code(error), headers)


def _told(error: PenstockError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": statuses.told(error)}}


async def _failed(request: Request, error: Any) -> Response:
    return _error(error)


async def _bug(request: Request, error: Exception) -> Response:
    return _error(InternalError(BUG))


async def _not_routed(request: Request, error: Any) -> Response:
    codes = {404: "unknown_route", 405: "wrong_method", 416: "invalid_request"}
    told = {"code": codes.get(error.status_code, "invalid_request"), "message": str(error.detail)}
    return _json({"error": told}, error.status_code, dict(error.headers or {}))
