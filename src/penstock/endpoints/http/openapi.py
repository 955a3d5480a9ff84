"""Routes with their OpenAPI documentation."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import HTTPConnection

from penstock.core.principals import Needs, Principal
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.http import schemas

Handler = Callable[[Request], Awaitable[Response]]
Admit = Callable[[HTTPConnection, Needs], Principal]  # raises Unauthenticated or Forbidden
H = TypeVar("H", bound=Callable[..., Awaitable[Response]])
PRINCIPAL, ADMIT = (
    "principal",
    "admit",
)  # keys in a request's scope: the caller, and a function that checks the caller again
OPENAI_PREFIX = "/v1/"  # paths whose errors have the format of OpenAI's API
# How a key can be sent; each route lists the scopes of which its key needs one.
SECURITY: Mapping[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "basic": {"type": "http", "scheme": "basic", "description": "The key is the password"},
}
SCHEMA_REFERENCE = "#/components/schemas/{model}"
JSON_FIELDS = ("metadata", "plan", "facts")  # fields of messages that are JSON themselves
JSON_TYPES = {
    FieldDescriptor.TYPE_INT64: "integer",
    FieldDescriptor.TYPE_UINT64: "integer",
    FieldDescriptor.TYPE_UINT32: "integer",
    FieldDescriptor.TYPE_INT32: "integer",
    FieldDescriptor.TYPE_DOUBLE: "number",
    FieldDescriptor.TYPE_BOOL: "boolean",
}


@dataclass(frozen=True, slots=True)
class Route:
    """A decorator that declares a method to be the handler of a route."""

    method: str
    paths: str | tuple[str, ...]
    summary: str
    description: str = ""
    _: KW_ONLY
    needs: Needs  # the scopes of which the caller's key needs one
    body: type[BaseModel] | None = None
    binary_body: Mapping[str, Any] = field(default_factory=dict)  # further media types
    answer: type[BaseModel | Message] | None = None
    binary_answer: Mapping[str, Any] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)  # name to description
    status: int = 200  # of a success

    def __call__(self, handler: H) -> H:
        vars(handler).setdefault("routes", []).insert(0, self)  # decorators are applied from the last to the first
        return handler


def create_router(edge: object, tag: str, admit: Admit) -> APIRouter:
    """Return a router with the decorated methods of `edge`, in their order, because the first match is used."""
    router = APIRouter(tags=[tag], redirect_slashes=False)
    for name, method in vars(type(edge)).items():
        for route in getattr(method, "routes", ()):
            add_route(router, route, getattr(edge, name), admit)
    return router


def add_route(router: APIRouter, route: Route, handler: Handler, admit: Admit) -> None:
    for path in [route.paths] if isinstance(route.paths, str) else route.paths:
        router.add_api_route(
            path,
            guard_handler(handler, route.needs, admit),
            methods=[route.method],
            summary=route.summary,
            description=route.description,
            operation_id=f"{route.method.lower()}{re.sub('[^a-z0-9]+', '_', path)}".rstrip("_"),
            response_model=None,
            response_class=Response,
            status_code=route.status,
            openapi_extra=_document_route(path, route),
        )


def guard_handler(handler: Handler, needs: Needs, admit: Admit) -> Handler:
    """Wrap a handler so that the guard checks the caller before the body is read."""

    @needs_scope(*needs)
    async def answer(request: Request) -> Response:
        request.scope[PRINCIPAL] = admit(request, needs)
        request.scope[ADMIT] = partial(admit, request, needs)
        return await handler(request)

    return answer


def get_principal(request: HTTPConnection) -> Principal:
    """Return the caller of a request that the guard admitted."""
    found: Principal = request.scope[PRINCIPAL]
    return found


def admit_again(request: HTTPConnection) -> None:
    """Check the caller again. Raise Unauthenticated or Forbidden if its key has expired or was revoked."""
    request.scope[ADMIT]()


def make_json_answer(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, headers, "application/json")


def read_path_names(request: Request) -> tuple[str, str]:
    """Return the model and the version in the path; a missing part is an empty string."""
    found = request.path_params
    return found.get("model", ""), found.get("version", "")


def list_models(*modules: ModuleType) -> list[type[BaseModel]]:
    every = [found for module in modules for found in vars(module).values()]
    return [
        found for found in every if isinstance(found, type) and issubclass(found, BaseModel) and found is not BaseModel
    ]


def build_openapi_document(
    app: FastAPI, models: Sequence[type[BaseModel]], further_schemas: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the application's OpenAPI document with the schemas of the models, and further schemas."""
    document = app.openapi()
    _, definitions = models_json_schema([(found, "validation") for found in models], ref_template=SCHEMA_REFERENCE)
    document["components"] = {"schemas": {**further_schemas, **definitions["$defs"]}, "securitySchemes": SECURITY}
    return document


def build_schemas(*descriptors: Any) -> dict[str, Any]:
    """Return the JSON schemas of protobuf messages and of the messages in their fields, by name."""
    found: dict[str, Any] = {}
    for descriptor in descriptors:
        _add_schema(descriptor, found)
    return found


def _add_schema(descriptor: Any, schemas: dict[str, Any]) -> None:
    if descriptor.name in schemas:
        return
    fields = schemas[descriptor.name] = {"type": "object", "properties": {}}
    for each in descriptor.fields:
        if each.name != "failure":
            fields["properties"][each.name] = _describe_field(each, schemas)


def _describe_field(field_descriptor: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    message = field_descriptor.message_type
    if message is not None and message.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _describe_field(message.fields_by_name["value"], schemas)}
    if message is not None:
        _add_schema(message, schemas)
        schema: dict[str, Any] = {"$ref": SCHEMA_REFERENCE.format(model=message.name)}
    elif field_descriptor.name in JSON_FIELDS:
        schema = {"type": "object"}
    else:
        schema = {"type": JSON_TYPES.get(field_descriptor.type, "string")}
    if field_descriptor.is_repeated:
        return {"type": "array", "items": schema}
    return {"anyOf": [schema, {"type": "null"}]} if field_descriptor.has_presence else schema


def _document_route(path: str, route: Route) -> dict[str, Any]:
    names = re.findall(r"{(\w+)(?::\w+)?}", path)
    error = schemas.OpenAiError if path.startswith(OPENAI_PREFIX) else schemas.Error
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
            str(route.status): {"description": "Done", "content": _document_content(route.answer, route.binary_answer)},
            "default": {
                "description": "Failed: 4xx is an error of the caller, 5xx an error of the server",
                "content": _document_content(error),
            },
        },
    }
    if route.needs:
        found["security"] = [{name: sorted(route.needs)} for name in SECURITY]
    if body := _document_content(route.body, route.binary_body):
        is_required = route.body is None or any(each.is_required() for each in route.body.model_fields.values())
        found["requestBody"] = {"content": body, "required": is_required}
    return found


def _document_content(
    model: type[BaseModel | Message] | None, further_types: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    found = dict(further_types or {})
    if model is not None:
        found["application/json"] = {"schema": {"$ref": SCHEMA_REFERENCE.format(model=model.__name__)}}
    return found
