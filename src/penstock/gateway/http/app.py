"""The gateway's HTTP application: inference first and bare, everything else routed."""

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from penstock.access.guard import declared_needs
from penstock.core.config import Limits
from penstock.core.errors import PenstockError
from penstock.core.principals import Needs, Principal
from penstock.gateway.catalogue import SERVER_NAME, Catalogue
from penstock.gateway.http import schemas
from penstock.gateway.http.admin import AdminRest
from penstock.gateway.http.calls import RestCalls
from penstock.gateway.http.doorman import Doorman
from penstock.gateway.http.lazy import LazyApp
from penstock.gateway.http.live.routes import LiveRest
from penstock.gateway.http.live.streams import LiveStreams
from penstock.gateway.http.message import Receive, Scope, Send
from penstock.gateway.http.oip.generate import GenerateRest
from penstock.gateway.http.oip.infer import InferEndpoint
from penstock.gateway.http.oip.routes import TOLD, OipRest
from penstock.gateway.http.oip.shared_memory import SharedMemoryRest
from penstock.gateway.http.openai import schemas as openai_schemas
from penstock.gateway.http.openai.routes import GenerationRest
from penstock.gateway.http.openapi import Admit, document_of, documentation_of, models_of, routes_of, schemas_of
from penstock.gateway.http.origins import shared_with
from penstock.gateway.http.refusals import refuse_call, routed_app
from penstock.gateway.http.v1 import schemas as v1_schemas
from penstock.gateway.http.v1.rerank import RerankRest
from penstock.gateway.http.v1.routes import OpenAiRest
from penstock.gateway.large import LargeMessages
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.streams.websocket import websocket_routes
from penstock.serving.serve import Serving

INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
ADMINISTRATION = "/v1/admin/"


def build_http_app(
    serving: Serving,
    catalogue: Catalogue,
    limits: Limits,
    metrics_registry: Callable[[], CollectorRegistry],
    doorman: Doorman,
    live: LiveStreams | None = None,
    memory: SharedMemory | None = None,
    large: LargeMessages | None = None,
    cluster: Callable[[Admit], FastAPI] | None = None,
) -> "HttpApp":
    """Where there are no live streams, there is no live view either. Every route must declare what it needs. `cluster`
    builds what is under /v1/admin, when it is first asked for."""
    routed = routed_app(SERVER_NAME, catalogue.server_version, "models have theirs at /v2/models/NAME/stream")

    def admit(connection: HTTPConnection, needs: Needs) -> Principal:
        try:
            return doorman.admit_scope(connection.scope, needs)
        except PenstockError as error:
            serving.turned_away("rest", error)
            raise

    administration = LazyApp(partial(cluster, admit)) if cluster is not None else None

    async def document() -> dict[str, Any]:
        models, messages = models_of(schemas, v1_schemas, openai_schemas), [each.DESCRIPTOR for each in TOLD]
        found = await asyncio.to_thread(document_of, routed, models, schemas_of(*messages))
        if administration is not None:
            from penstock.gateway.http.cluster.app import cluster_document

            further = await cluster_document(cast(FastAPI, await administration.app()))
            found["paths"] |= further["paths"]
            found["components"]["schemas"] = further["components"]["schemas"] | found["components"]["schemas"]
        return found

    large = large or LargeMessages(limits)
    calls = RestCalls(serving, catalogue, limits, large)
    routers = [
        routes_of(OipRest(catalogue, calls), "Open Inference Protocol", admit),
        routes_of(GenerateRest(calls, catalogue), "Open Inference Protocol", admit),
        routes_of(OpenAiRest(calls, catalogue), "REST under /v1", admit),
        routes_of(RerankRest(calls), "REST under /v1", admit),
        routes_of(GenerationRest(calls), "REST under /v1", admit),
        routes_of(AdminRest(serving, catalogue, calls, metrics_registry), "Operations", admit),
        websocket_routes(serving, catalogue, large, doorman, memory),
        documentation_of(document, admit),
    ]
    if memory is not None:
        routers.append(routes_of(SharedMemoryRest(memory, calls), "Shared memory", admit))
    if live is not None:
        routers.append(LiveRest(live, catalogue.server_version, admit).router())
    for router in routers:
        routed.include_router(router)
    infer = InferEndpoint(serving, catalogue, limits, large, doorman, memory)
    routes = [route for router in routers for route in router.routes]
    return HttpApp(infer, routed, doorman, serving, routes, administration)


class HttpApp:
    def __init__(
        self,
        infer: InferEndpoint,
        routed: FastAPI,
        doorman: Doorman,
        serving: Serving,
        routes: Sequence[BaseRoute],
        administration: ASGIApp | None = None,
    ) -> None:
        self.routes = [(route, declared_needs(getattr(route, "endpoint", route))) for route in routes]
        self.infer = infer
        self.doorman = doorman
        self._routed = routed
        self._administration = administration
        self._serving = serving
        self._inside = shared_with(doorman.origins, self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.doorman.refusal(scope["headers"], scope.get("method", ""))
        if error is None:
            await self._inside(scope, receive, send)
            return
        self._serving.turned_away("rest" if scope["type"] == "http" else "websocket", error)
        await refuse_call(error, scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            found = INFER.fullmatch(scope["path"])
            if found is not None:
                await self.infer(scope, receive, send, found[1], found[2] or "")
                return
        if self._administration is not None and scope["path"].startswith(ADMINISTRATION):
            await self._administration(scope, receive, send)
            return
        await self._routed(scope, receive, send)
