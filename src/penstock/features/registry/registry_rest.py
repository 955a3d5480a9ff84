"""The model registry over REST, on a manager's HTTP endpoint. Files are uploaded with tus 1.0.

Files are streamed in both directions, and never held in memory as a whole.
"""

import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.core.errors import InvalidRequest, NotFound, PreconditionFailed, UnknownModel
from penstock.core.principals import ADMIN_SCOPES, Scope, make_needs
from penstock.endpoints.http.bodies import read_json_document, read_pieces
from penstock.endpoints.http.openapi import Route, make_json_answer
from penstock.features.registry.manifest import VERSION, ModelFacts, make_manifest, read_document

if TYPE_CHECKING:
    from penstock.features.registry.model_registry import ModelRegistry, UploadProgress
    from penstock.features.registry.version_records import RegisteredVersion

ROOT = "/v1/registry"
VERSION_PATH = ROOT + "/models/{model}/versions/{version}"
FILE_PATH = ROOT + "/uploads/{upload}/files/{sha256}"
TUS = {"tus-resumable": "1.0.0"}
OFFSET_STREAM = "application/offset+octet-stream"
RANGE = re.compile(r"bytes=(?:(?P<first>[0-9]{1,18})-(?P<last>[0-9]{0,18})|-(?P<tail>[0-9]{1,18}))")
UPLOADING, READING = make_needs(Scope.UPLOAD), make_needs(Scope.UPLOAD, Scope.JOIN)
LISTING = make_needs(Scope.UPLOAD, Scope.JOIN, Scope.METRICS)


class RegistryRest:
    def __init__(self, registry: "ModelRegistry") -> None:
        self._registry = registry

    # --- versions

    @Route("GET", (ROOT + "/models", ROOT + "/models/{model}"), "List the versions in the registry", needs=LISTING)
    async def list(self, request: Request) -> Response:
        found = await self._registry.list(request.path_params.get("model", ""))
        if not found and "model" in request.path_params:
            raise UnknownModel(f"the registry has no model '{request.path_params['model'][:128]}'")
        return make_json_answer({"models": [_make_version_fields(each) for each in found]})

    @Route("GET", VERSION_PATH, "Get a version, by number or alias, with its files", needs=READING)
    async def find(self, request: Request) -> Response:
        found = await self._find_version(request)
        manifest = await self._registry.read_manifest(found.record.digest)
        return make_json_answer(
            {**_make_version_fields(found), "files": [file.model_dump() for file in manifest.files]}
        )

    @Route("DELETE", VERSION_PATH, "Delete a version", needs=ADMIN_SCOPES, status=204)
    async def delete(self, request: Request) -> Response:
        await self._registry.delete(request.path_params["model"], request.path_params["version"])
        return Response(status_code=204)

    @Route("GET", VERSION_PATH + "/files/{path:path}", "Download a file of a version, or a range of it", needs=READING)
    async def download(self, request: Request) -> Response:
        manifest = await self._registry.read_manifest((await self._find_version(request)).record.digest)
        file = manifest.find_file(request.path_params["path"])
        if file is None:
            raise UnknownModel(f"the version has no file '{request.path_params['path'][:200]}'")
        first, last = _parse_range(request.headers.get("range", ""), file.size_bytes)
        headers = {"accept-ranges": "bytes", "etag": f'"{file.sha256}"', "content-length": str(last - first)}
        is_part = "range" in request.headers
        if is_part:
            headers["content-range"] = f"bytes {first}-{last - 1}/{file.size_bytes}"
        pieces = self._registry.read(file.sha256, first)
        media = "application/octet-stream"
        return StreamingResponse(_limit_bytes(pieces, last - first), 206 if is_part else 200, headers, media)

    @Route("PUT", ROOT + "/models/{model}/aliases/{alias}", "Set an alias to a version", needs=UPLOADING, status=204)
    async def set_alias(self, request: Request) -> Response:
        version = (await read_json_document(request)).get("version")
        if not isinstance(version, str) or not version:
            raise InvalidRequest('the body must have the version: {"version": "3"}')
        await self._registry.set_alias(request.path_params["model"], request.path_params["alias"], version)
        return Response(status_code=204)

    @Route("DELETE", ROOT + "/models/{model}/aliases/{alias}", "Delete an alias", needs=UPLOADING, status=204)
    async def delete_alias(self, request: Request) -> Response:
        await self._registry.set_alias(request.path_params["model"], request.path_params["alias"], "")
        return Response(status_code=204)

    # --- uploads

    @Route("POST", VERSION_PATH, "Start or find an upload", needs=UPLOADING, status=201)
    async def begin(self, request: Request) -> Response:
        body = await read_json_document(request)
        if unknown := sorted(body.keys() - {"files", "metadata"}):
            raise InvalidRequest(f"unknown field '{unknown[0][:80]}': use 'files' and 'metadata'")
        files = body.get("files")
        if isinstance(files, list):
            files.sort(key=lambda file: str(file.get("path", "")) if isinstance(file, dict) else "")
        manifest = make_manifest(request.path_params["model"], request.path_params["version"], files)
        facts = read_document(ModelFacts, orjson.dumps(body.get("metadata") or {}), "metadata")
        progress = await self._registry.begin(manifest, facts)
        headers = {"location": f"{ROOT}/uploads/{progress.upload_id}"}
        return make_json_answer(_make_progress_fields(progress), 200 if progress.is_committed else 201, headers)

    @Route("GET", ROOT + "/uploads/{upload}", "Get the progress of an upload", needs=UPLOADING)
    async def progress(self, request: Request) -> Response:
        return make_json_answer(
            _make_progress_fields(await self._registry.read_progress(request.path_params["upload"]))
        )

    @Route("HEAD", FILE_PATH, "Get the stored size of a file", needs=UPLOADING)
    async def offset(self, request: Request) -> Response:
        _check_tus(request)
        progress = await self._registry.read_progress(request.path_params["upload"])
        sha256 = request.path_params["sha256"]
        if sha256 not in progress.offsets:
            raise NotFound("the upload has no such file")
        sizes = {"upload-offset": progress.offsets[sha256], "upload-length": progress.manifest.blobs[sha256]}
        return Response(headers={**TUS, "cache-control": "no-store", **{key: str(n) for key, n in sizes.items()}})

    @Route("PATCH", FILE_PATH, "Upload a part of a file, with tus 1.0", needs=UPLOADING, status=204)
    async def append(self, request: Request) -> Response:
        _check_tus(request)
        if request.headers.get("content-type", "").partition(";")[0].strip() != OFFSET_STREAM:
            raise InvalidRequest(f"missing or invalid header content-type: send {OFFSET_STREAM}")
        offset = request.headers.get("upload-offset", "")
        if not re.fullmatch("[0-9]{1,18}", offset):
            raise InvalidRequest(
                "missing or invalid header upload-offset: send the number of bytes stored so far, as a HEAD request "
                "returns it"
            )
        names = request.path_params
        there = await self._registry.append(names["upload"], names["sha256"], int(offset), read_pieces(request))
        return Response(status_code=204, headers={**TUS, "upload-offset": str(there)})

    @Route("POST", ROOT + "/uploads/{upload}/commit", "Register the version of an upload", needs=UPLOADING, status=201)
    async def commit(self, request: Request) -> Response:
        return make_json_answer(_make_version_fields(await self._registry.commit(request.path_params["upload"])), 201)

    @Route("DELETE", ROOT + "/uploads/{upload}", "Abort an upload", needs=UPLOADING, status=204)
    async def abort(self, request: Request) -> Response:
        _check_tus(request)
        await self._registry.abort(request.path_params["upload"])
        return Response(status_code=204, headers=TUS)

    @Route("OPTIONS", FILE_PATH, "Get the supported tus version and extensions", needs=UPLOADING, status=204)
    async def options(self, request: Request) -> Response:
        return Response(status_code=204, headers={**TUS, "tus-version": "1.0.0", "tus-extension": "termination"})

    async def _find_version(self, request: Request) -> "RegisteredVersion":
        """Find the version that the path names by number or alias."""
        version = request.path_params["version"]
        mark = ":" if VERSION.fullmatch(version) else "@"
        return await self._registry.find(f"{request.path_params['model']}{mark}{version}")


def _check_tus(request: Request) -> None:
    given = request.headers.get("tus-resumable", TUS["tus-resumable"])
    if given != TUS["tus-resumable"]:
        message = f"tus version {given[:40]} is not supported: send tus-resumable: {TUS['tus-resumable']}, or omit it"
        raise PreconditionFailed(message, reason="tus_version")


async def _limit_bytes(pieces: AsyncIterator[bytes], left: int) -> AsyncIterator[bytes]:
    if not left:
        return
    async for piece in pieces:
        yield piece[:left]
        left -= len(piece)
        if left <= 0:
            return


def _parse_range(header: str, size: int) -> tuple[int, int]:
    """Return the start of the range, and its end (exclusive)."""
    if not header:
        return 0, size
    found = RANGE.fullmatch(header)
    if found is None:
        raise HTTPException(416, f"give one range of bytes, not '{header[:80]}'", {"content-range": f"bytes */{size}"})
    if found["tail"]:
        first, last = max(0, size - int(found["tail"])), size
    else:
        first, last = int(found["first"]), min(int(found["last"]) + 1, size) if found["last"] else size
    if first >= last:
        raise HTTPException(416, f"the file has {size} bytes", {"content-range": f"bytes */{size}"})
    return first, last


def _make_version_fields(found: "RegisteredVersion") -> dict[str, Any]:
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


def _make_progress_fields(progress: "UploadProgress") -> dict[str, Any]:
    files = [
        {"sha256": sha256, "size_bytes": size, "offset": progress.offsets[sha256]}
        for sha256, size in progress.manifest.blobs.items()
    ]
    return {"upload": progress.upload_id, "is_committed": progress.is_committed, "files": files}
