"""Routes with their documentation, and the page that shows it without reaching for anything beyond this server."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock.gateway.http import schemas
from penstock.gateway.http.v1 import schemas as v1_schemas

Handler = Callable[[Request], Awaitable[Response]]
REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Handler
    summary: str
    description: str = ""
    body: type[BaseModel] | None = None
    binary_body: Mapping[str, Any] = field(default_factory=dict)  # further media types
    is_body_required: bool = True
    answer: type[BaseModel] | None = None
    binary_answer: Mapping[str, Any] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)  # name to description


def add_routes(tag: str, routes: Sequence[Route], error: type[BaseModel] = schemas.Error) -> APIRouter:
    router = APIRouter(tags=[tag], redirect_slashes=False)
    for route in routes:
        router.add_api_route(
            route.path,
            route.handler,
            methods=[route.method],
            summary=route.summary,
            description=route.description,
            operation_id=f"{route.method.lower()}{re.sub('[^a-z0-9]+', '_', route.path)}".rstrip("_"),
            response_model=None,
            response_class=Response,
            openapi_extra=_documentation(route, error),
        )
    return router


def json_answer(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, headers, "application/json")


def path_names(request: Request) -> tuple[str, str]:
    """Model and version, empty where the path has none."""
    found = request.path_params
    return found.get("model", ""), found.get("version", "")


def describe(app: FastAPI) -> None:
    """Adds /openapi.json and /docs."""
    page = files("penstock.gateway.http").joinpath("docs.html").read_bytes()
    document: list[bytes] = []

    async def openapi(request: Request) -> Response:
        if not document:
            document.append(orjson.dumps(_document(app)))
        return Response(document[0], media_type="application/json")

    async def docs(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8")

    app.add_api_route("/openapi.json", openapi, methods=["GET"], include_in_schema=False)
    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)


def _document(app: FastAPI) -> dict[str, Any]:
    document = app.openapi()
    every = {**vars(schemas), **vars(v1_schemas)}.values()
    documented = [found for found in every if isinstance(found, type) and issubclass(found, BaseModel)]
    _, definitions = models_json_schema(
        [(found, "validation") for found in documented if found is not BaseModel], ref_template=REF
    )
    document["components"] = {"schemas": definitions["$defs"]}
    return document


def _documentation(route: Route, error: type[BaseModel]) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", route.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    parameters += [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
        for name, text in route.query.items()
    ]
    found: dict[str, Any] = {
        "parameters": parameters,
        "responses": {
            "200": {"description": "Done", "content": _content(route.answer, route.binary_answer)},
            "default": {
                "description": "Not done: 4xx is the caller's part, 5xx the server's",
                "content": _content(error),
            },
        },
    }
    if body := _content(route.body, route.binary_body):
        found["requestBody"] = {"content": body, "required": route.is_body_required}
    return found


def _content(model: type[BaseModel] | None, further: Mapping[str, Any] | None = None) -> dict[str, Any]:
    found = dict(further or {})
    if model is not None:
        found["application/json"] = {"schema": {"$ref": REF.format(model=model.__name__)}}
    return found
