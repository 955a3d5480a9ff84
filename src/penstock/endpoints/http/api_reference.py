"""The routes /openapi.json and /docs: the API's description, and Swagger UI, which shows it and sends requests."""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from functools import cache, partial
from importlib.resources import files
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import Response

from penstock.core.principals import ANY_SCOPE
from penstock.endpoints.http.openapi import Admit, guard_handler

PAGE_FILES = {  # from the package fastapi-swagger, so that the page loads nothing from other servers
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
PAGE_OPTIONS = {"docExpansion": "list", "filter": True, "displayRequestDuration": True, "persistAuthorization": True}


def create_reference_routes(build_document: Callable[[], Awaitable[dict[str, Any]]], admit: Admit) -> APIRouter:
    """Return the routes of the API reference. `build_document` builds the OpenAPI document at the first request."""
    document: list[bytes] = []

    async def openapi(request: Request) -> Response:
        if not document:
            document.append(orjson.dumps(await build_document()))
        return Response(document[0], media_type="application/json")

    async def docs(request: Request) -> Response:
        page, policy = _build_page()
        return Response(page, headers={"content-security-policy": policy}, media_type="text/html; charset=utf-8")

    router = APIRouter(redirect_slashes=False)
    handlers = {"/openapi.json": openapi, "/docs": docs} | {
        f"/docs/{name}": partial(_serve_file, name) for name in PAGE_FILES
    }
    for path, handler in handlers.items():
        router.add_api_route(path, guard_handler(handler, ANY_SCOPE, admit), methods=["GET"], include_in_schema=False)
    return router


async def _serve_file(name: str, request: Request) -> Response:
    return Response(_read_file(name), headers={"cache-control": "max-age=86400"}, media_type=PAGE_FILES[name])


@cache
def _read_file(name: str) -> bytes:
    return files("fastapi_swagger.resources").joinpath(name).read_bytes()


@cache
def _build_page() -> tuple[bytes, str]:
    """Return Swagger UI's page and its content security policy, which allows only this page's own script."""
    script, style, icon = (
        f"docs/{name}" for name in PAGE_FILES
    )  # relative: the server may be behind a path of a proxy
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Penstock API",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
        swagger_ui_parameters=PAGE_OPTIONS,
    ).body
    own = re.search(rb"<script>(.*?)</script>", bytes(page), re.DOTALL)
    assert own is not None
    digest = base64.b64encode(hashlib.sha256(own[1]).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return bytes(page), policy
