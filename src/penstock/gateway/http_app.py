"""The gateway's HTTP application and server. Tensor inference is answered before routing; other requests are routed."""

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from penstock.core.config import SERVER_NAME, Limits
from penstock.core.errors import PenstockError
from penstock.core.principals import INFERENCE_SCOPES, Needs, Principal
from penstock.endpoints.connection_limits import ConnectionLimits, compute_max_http_connections, raise_file_limit
from penstock.endpoints.guard import get_declared_needs
from penstock.endpoints.held_bytes import Transit
from penstock.endpoints.http import schemas
from penstock.endpoints.http.api_reference import create_reference_routes
from penstock.endpoints.http.bodies import wrap_large_body
from penstock.endpoints.http.cors import add_cors
from penstock.endpoints.http.handshake import add_tls
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.endpoints.http.http_message import Receive, Scope, Send
from penstock.endpoints.http.http_server import create_uvicorn_server
from penstock.endpoints.http.lazy import LazyApp
from penstock.endpoints.http.openapi import Admit, build_openapi_document, build_schemas, create_router, list_models
from penstock.endpoints.http.refusals import create_routed_app, refuse_call
from penstock.endpoints.http.websocket_protocol import StreamProtocol
from penstock.endpoints.large_messages import LargeMessagePool
from penstock.features.async_requests import async_rest
from penstock.features.async_requests.async_requests import AsyncRequests
from penstock.features.async_requests.async_rest import AsyncResponder, AsyncRest
from penstock.features.live import live_routes
from penstock.features.live.live_routes import LiveRest
from penstock.features.live.streams import LiveStreams
from penstock.features.request_log.log_rest import LogRest
from penstock.features.search import search_rest
from penstock.features.search.block_search import BlockSearch
from penstock.features.search.search_rest import SearchRest
from penstock.gateway.blocks import packet_schemas
from penstock.gateway.blocks.packet_calls import PacketCalls
from penstock.gateway.blocks.packet_rest import PacketRest
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http_calls import RestCalls
from penstock.gateway.oip.generate_routes import GenerateRest
from penstock.gateway.oip.message_size import ENVELOPE_BYTES
from penstock.gateway.oip.rest_infer import InferEndpoint
from penstock.gateway.oip.rest_routes import DOCUMENTED_MESSAGES, OipRest
from penstock.gateway.openai import openai_schemas
from penstock.gateway.openai.openai_routes import GenerationRest
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.shared_memory.shared_memory_rest import SharedMemoryRest
from penstock.gateway.short_path.infer_protocol import InferProtocol
from penstock.gateway.v1 import v1_schemas
from penstock.gateway.v1.operator_routes import OperatorRest
from penstock.gateway.v1.rerank_routes import RerankRest
from penstock.gateway.v1.v1_routes import V1Rest
from penstock.gateway.websocket.websocket_routes import create_websocket_routes
from penstock.serving.serve import Serving
from penstock.wire.credentials.certificates import Certificates

INFER_PATTERN = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
INFER_PATHS = ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")
ADMINISTRATION_PREFIX = "/v1/admin/"


def build_http_app(
    serving: Serving,
    catalogue: Catalogue,
    limits: Limits,
    metrics_registry: Callable[[], CollectorRegistry],
    http_guard: HttpGuard,
    live: LiveStreams | None = None,
    memory: SharedMemory | None = None,
    large: LargeMessagePool | None = None,
    cluster: Callable[[Admit], FastAPI] | None = None,
    search: BlockSearch | None = None,
    requests: AsyncRequests | None = None,
) -> "HttpApp":
    """Build the application; raise TypeError if a route declares no scopes.

    Without `live`, `search` or `requests`, there is no live view, no search, or no asynchronous requests. `cluster`
    builds the application under /v1/admin at its first request.
    """
    routed = create_routed_app(
        SERVER_NAME, catalogue.server_version, "models have WebSockets at /v2/models/NAME/stream"
    )

    def admit(connection: HTTPConnection, needs: Needs) -> Principal:
        try:
            return http_guard.admit_scope(connection.scope, needs)
        except PenstockError as error:
            serving.count_rejected("rest", error)
            raise

    administration = LazyApp(partial(cluster, admit)) if cluster is not None else None

    async def document() -> dict[str, Any]:
        models, messages = (
            list_models(schemas, live_routes, search_rest, v1_schemas, openai_schemas, packet_schemas, async_rest),
            [each.DESCRIPTOR for each in DOCUMENTED_MESSAGES],
        )
        found = await asyncio.to_thread(build_openapi_document, routed, models, build_schemas(*messages))
        if administration is not None:
            from penstock.features.admin.apps import build_cluster_document

            further = await build_cluster_document(cast(FastAPI, await administration.app()))
            found["paths"] |= further["paths"]
            found["components"]["schemas"] = further["components"]["schemas"] | found["components"]["schemas"]
        return found

    large = large or LargeMessagePool(limits)
    calls = RestCalls(serving, catalogue, limits, large)
    packets = PacketRest(calls, PacketCalls(serving, catalogue, large, requests))
    routers = [
        create_router(OipRest(catalogue, calls), "Open Inference Protocol", admit),
        create_router(GenerateRest(calls, catalogue), "Open Inference Protocol", admit),
        create_router(V1Rest(calls, catalogue, packets), "REST under /v1", admit),
        create_router(packets, "REST under /v1", admit),
        create_router(RerankRest(calls), "REST under /v1", admit),
        create_router(GenerationRest(calls), "REST under /v1", admit),
        create_router(OperatorRest(serving, catalogue, calls, metrics_registry), "Operations", admit),
        create_router(LogRest(serving.request_log), "Request log", admit),
        create_websocket_routes(serving, catalogue, large, http_guard, memory),
        create_reference_routes(document, admit),
    ]
    if memory is not None:
        routers.append(create_router(SharedMemoryRest(memory, calls), "Shared memory", admit))
    if search is not None:
        routers.append(create_router(SearchRest(search), "REST under /v1", admit))
    if requests is not None:
        routers.append(create_router(AsyncRest(requests), "REST under /v1", admit))
    if live is not None:
        routers.append(LiveRest(live, catalogue.server_version, admit).router())
    for router in routers:
        routed.include_router(router)
    infer = InferEndpoint(serving, catalogue, limits, large, http_guard, memory)
    routes = [route for router in routers for route in router.routes]
    responder = (
        None if requests is None else AsyncResponder(requests, http_guard, limits, _list_inference_routes(routes))
    )
    return HttpApp(infer, routed, http_guard, serving, routes, administration, responder)


def _list_inference_routes(routes: Sequence[BaseRoute]) -> list[BaseRoute]:
    """Return the HTTP routes of inference; `INFER_PATTERN` is answered before routing."""
    found = [route for route in routes if isinstance(route, Route) and "POST" in (route.methods or ())]
    return [
        *(Route(path, _raise_unreachable, methods=["POST"]) for path in INFER_PATHS),
        *(route for route in found if get_declared_needs(route.endpoint) == INFERENCE_SCOPES),
    ]


def _raise_unreachable(request: Request) -> Response:
    raise AssertionError("this route is only matched")


class HttpApp:
    """The ASGI application, which checks host and origin, and then routes each request."""

    def __init__(
        self,
        infer: InferEndpoint,
        routed: FastAPI,
        http_guard: HttpGuard,
        serving: Serving,
        routes: Sequence[BaseRoute],
        administration: ASGIApp | None = None,
        responder: AsyncResponder | None = None,
    ) -> None:
        self.routes = [(route, get_declared_needs(getattr(route, "endpoint", route))) for route in routes]
        self.infer = infer
        self.http_guard = http_guard
        self._routed = routed
        self._administration = administration
        self._responder = responder
        self._serving = serving
        self._app_with_cors = add_cors(http_guard.origins, self._answer_in_room)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.http_guard.find_refusal(scope["headers"], scope.get("method", ""))
        if error is None:
            await self._app_with_cors(scope, receive, send)
            return
        self._serving.count_rejected("rest" if scope["type"] == "http" else "websocket", error)
        await refuse_call(error, scope, receive, send)

    async def _answer_in_room(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; a large body waits until there is room for it."""
        body, is_upload = None, scope["path"].startswith(ADMINISTRATION_PREFIX)
        if scope["type"] == "http" and scope["method"] == "POST" and not is_upload:
            admission = self._serving.admission
            body = wrap_large_body(scope, receive, admission.room, admission.limits.max_message_bytes)
        if body is None:
            await self._answer(scope, receive, send)
            return
        try:
            await self._answer(scope, body, send)
        finally:
            body.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            if self._responder is not None and self._responder.wants(scope):
                await self._responder.answer(self._answer, scope, receive, send)
                return
            found = INFER_PATTERN.fullmatch(scope["path"])
            if found is not None:
                await self.infer(scope, receive, send, found[1], found[2] or "")
                return
        if self._administration is not None and scope["path"].startswith(ADMINISTRATION_PREFIX):
            await self._administration(scope, receive, send)
            return
        await self._routed(scope, receive, send)


def create_http_server(
    app: HttpApp, limits: Limits, transit: Transit, certificates: Certificates, is_behind_edge: bool = False
) -> uvicorn.Server:
    """Build the server. `is_behind_edge`: all requests come from the edge, which bounds its clients' connections."""
    connection_limits = ConnectionLimits(
        limits,
        transit,
        app.infer.count_rejected,
        compute_max_http_connections(limits, raise_file_limit()),
        is_behind_edge,
    )
    protocol = add_tls(
        partial(InferProtocol, app.infer, app.http_guard, connection_limits), connection_limits, certificates
    )
    websockets = {
        "ws": partial(StreamProtocol, connection_limits),
        "ws_max_size": limits.max_message_bytes + ENVELOPE_BYTES,
    }
    return create_uvicorn_server(cast(ASGIApp, app), protocol, backlog=2048, date_header=False, **websockets)
