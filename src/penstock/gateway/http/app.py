"""The gateway's HTTP application: inference first and bare, everything else routed."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from penstock.access.guard import declared_needs
from penstock.core.config import Limits
from penstock.core.errors import BUG, InternalError, PenstockError, RateLimited
from penstock.core.principals import Needs, Principal
from penstock.gateway import statuses
from penstock.gateway.catalogue import SERVER_NAME, Catalogue
from penstock.gateway.http.admin import AdminRest
from penstock.gateway.http.calls import RestCalls
from penstock.gateway.http.doorman import Doorman, certificate_of
from penstock.gateway.http.live.routes import LiveRest
from penstock.gateway.http.live.streams import LiveStreams
from penstock.gateway.http.message import ClientLeft, Receive, Scope, Send
from penstock.gateway.http.oip.infer import InferEndpoint
from penstock.gateway.http.oip.routes import OipRest
from penstock.gateway.http.oip.shared_memory import SharedMemoryRest
from penstock.gateway.http.openapi import OPENAI, documentation_of, json_answer, routes_of
from penstock.gateway.http.v1.rerank import RerankRest
from penstock.gateway.http.v1.routes import OpenAiRest
from penstock.gateway.large import LargeMessages
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.streams.websocket import websocket_routes
from penstock.serving.serve import Serving

INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
METHODS = ("GET", "POST", "PUT", "DELETE")  # that pages of allowed origins may use
EXPOSED = (
    "penstock-code",
    "penstock-limit",
    "retry-after",
    "retry-after-ms",
    "ratelimit",
    "ratelimit-policy",
    "x-request-id",
    "inference-header-content-length",
)
PATH_CHARS = 200  # of what a caller asked for and is told
OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}


def build_http_app(
    serving: Serving,
    catalogue: Catalogue,
    limits: Limits,
    metrics_registry: Callable[[], CollectorRegistry],
    doorman: Doorman,
    live: LiveStreams | None = None,
    memory: SharedMemory | None = None,
    large: LargeMessages | None = None,
) -> "HttpApp":
    """Where there are no live streams, there is no live view either. Every route must declare what it needs."""
    routed = FastAPI(
        title=SERVER_NAME,
        version=catalogue.server_version,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )

    def admit(connection: HTTPConnection, needs: Needs) -> Principal:
        try:
            return doorman.admit(connection.scope["headers"], needs, certificate_of(connection.scope))
        except PenstockError as error:
            serving.turned_away("rest", error)
            raise

    large = large or LargeMessages(limits)
    calls = RestCalls(serving, catalogue, limits, large)
    routers = [
        routes_of(OipRest(catalogue, calls), "Open Inference Protocol", admit),
        routes_of(OpenAiRest(calls, catalogue), "REST under /v1", admit),
        routes_of(RerankRest(calls), "REST under /v1", admit),
        routes_of(AdminRest(serving, catalogue, calls, metrics_registry), "Operations", admit),
        websocket_routes(serving, catalogue, large, doorman, memory),
        documentation_of(routed, admit),
    ]
    if memory is not None:
        routers.append(routes_of(SharedMemoryRest(memory, calls), "Shared memory", admit))
    if live is not None:
        routers.append(LiveRest(live, catalogue.server_version, admit).router())
    for router in routers:
        routed.include_router(router)
    routed.router.default = _not_found
    routed.add_exception_handler(PenstockError, _penstock_error)
    routed.add_exception_handler(HTTPException, _routing_error)
    routed.add_exception_handler(ClientLeft, _client_left)
    routed.add_exception_handler(Exception, _bug)
    infer = InferEndpoint(serving, catalogue, limits, large, doorman, memory)
    return HttpApp(infer, routed, doorman, serving, [route for router in routers for route in router.routes])


class HttpApp:
    def __init__(
        self, infer: InferEndpoint, routed: FastAPI, doorman: Doorman, serving: Serving, routes: Sequence[BaseRoute]
    ) -> None:
        self.routes = [(route, declared_needs(getattr(route, "endpoint", route))) for route in routes]
        self.infer = infer
        self.doorman = doorman
        self._routed = routed
        self._serving = serving
        self._inside: ASGIApp = self._answer
        if doorman.origins:
            self._inside = CORSMiddleware(
                self._answer, doorman.origins, METHODS, ("*",), allow_private_network=True, expose_headers=EXPOSED
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.doorman.refusal(scope["headers"], scope.get("method", ""))
        if error is None:
            await self._inside(scope, receive, send)
            return
        self._serving.turned_away("rest" if scope["type"] == "http" else "websocket", error)
        refusal = await _penstock_error(HTTPConnection(scope), error)
        await refusal(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            found = INFER.fullmatch(scope["path"])
            if found is not None:
                await self.infer(scope, receive, send, found[1], found[2] or "")
                return
        await self._routed(scope, receive, send)


async def _penstock_error(request: HTTPConnection, error: Any) -> Response:
    headers = statuses.headers(error)
    if not error.is_retryable:
        headers["x-should-retry"] = "false"  # OpenAI's clients would try a 429 again
    if isinstance(error, RateLimited) and request.scope["path"].startswith(OPENAI):
        headers |= statuses.openai_limit_headers(error.standings)
    if hasattr(request.state, "request_id"):
        headers["x-request-id"] = request.state.request_id
    return _error(request, statuses.http_code(error), error.code, statuses.told(error), headers)


async def _routing_error(request: Request, error: Any) -> Response:
    path = request.url.path[:PATH_CHARS]
    if error.status_code == 405:
        message = f"{request.method[:PATH_CHARS]} is not for {path}; /docs lists what is"
    else:
        message = f"there is no {path}; /docs lists what there is"
    code = {404: "unknown_route", 405: "wrong_method"}.get(error.status_code, "invalid_request")
    return _error(request, error.status_code, code, message, dict(error.headers or {}))


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "websocket":
        raise HTTPException(404)
    message = f"there is no WebSocket at {scope['path'][:PATH_CHARS]}; models have theirs at /v2/models/NAME/stream"
    await WebSocket(scope, receive, send).send_denial_response(json_answer({"error": message}, 404))


async def _bug(request: Request, error: Exception) -> Response:
    return await _penstock_error(request, InternalError(BUG))


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody hears it


def _error(request: HTTPConnection, status: int, code: str, message: str, headers: dict[str, str]) -> Response:
    path = request.scope["path"]
    if not path.startswith(OPENAI):
        return json_answer({"error": message}, status, headers)
    kind = OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return json_answer({"error": {"message": message, "type": kind, "code": code, "param": None}}, status, headers)
