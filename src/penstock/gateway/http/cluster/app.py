"""The applications that show a cluster over HTTP: a gateway's part of one, and the whole of a manager's door."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from penstock.access.guard import declared_needs
from penstock.core.principals import Needs, Principal
from penstock.gateway.catalogue import SERVER_NAME
from penstock.gateway.http import schemas as gateway_schemas
from penstock.gateway.http.cluster import schemas
from penstock.gateway.http.cluster.calls import ClusterCalls
from penstock.gateway.http.cluster.overview import MODEL_SCHEMA, ModelsRest
from penstock.gateway.http.cluster.resources import CALLS, call_routes
from penstock.gateway.http.cluster.watch import WatchEdge
from penstock.gateway.http.doorman import Doorman
from penstock.gateway.http.openapi import Admit, document_of, documentation_of, models_of, routes_of, schemas_of
from penstock.gateway.http.origins import shared_with
from penstock.gateway.http.refusals import PATH_CHARS, refuse_call, routed_app
from penstock.manager.access.door import Acting, acting
from penstock.pb.v1 import registry_pb2

log = structlog.get_logger()
ERRORS: tuple[type[BaseModel], ...] = (gateway_schemas.OpenAiError, gateway_schemas.Error)


def build_cluster_app(calls: ClusterCalls, version: str, admit: Admit, registry: object = None) -> FastAPI:
    """`registry`: the registry's routes, where this is a manager's door; that has pages of its own, too."""
    app = routed_app(f"{SERVER_NAME} administration", version, "the cluster has its own at /v1/admin/watch")
    routers = cluster_routers(calls, admit, registry)
    if registry is not None:
        routers.append(documentation_of(partial(cluster_document, app), admit))
    for router in routers:
        for route in router.routes:
            declared_needs(getattr(route, "endpoint", route))  # raises where it declares nothing
        app.include_router(router)
    return app


def cluster_routers(calls: ClusterCalls, admit: Admit, registry: object = None) -> list[APIRouter]:
    routers = [routes_of(ModelsRest(calls), "Cluster", admit), *call_routes(calls, admit)]
    if registry is not None:
        routers.append(routes_of(registry, "Model registry", admit))
    return [*routers, WatchEdge(calls, admit).router()]


async def cluster_document(app: FastAPI) -> dict[str, Any]:
    models = [*models_of(schemas), *ERRORS]
    resources = [call.told for table in CALLS.values() for call in table if call.status != 204]
    told = schemas_of(*resources, registry_pb2.ModelVersion.DESCRIPTOR)
    return await asyncio.to_thread(document_of, app, models, {**told, "Model": MODEL_SCHEMA})


class ManagerApp:
    """Whoever the doorman lets in."""

    def __init__(self, doorman: Doorman, build: Callable[[Admit], FastAPI]) -> None:
        self._doorman = doorman
        self._app = shared_with(doorman.origins, build(self.admit))

    def admit(self, connection: HTTPConnection, needs: Needs) -> Principal:
        scope = connection.scope
        principal = self._doorman.admit_scope(scope, needs)
        acting.set(Acting(principal, f"{scope.get('method', 'GET')} {scope['path'][:PATH_CHARS]}"))
        return principal

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        refusal = self._doorman.refusal(scope["headers"], scope.get("method", ""))
        if refusal is not None:
            await refuse_call(refusal, scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            log.debug("client_left", path=scope["path"][:PATH_CHARS])
