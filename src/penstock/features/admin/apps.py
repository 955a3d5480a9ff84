"""The HTTP applications of the administration: one for a part of a gateway's endpoint, one for a manager's endpoint."""

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

from penstock.core.config import SERVER_NAME
from penstock.core.principals import Needs, Principal
from penstock.endpoints.guard import get_declared_needs
from penstock.endpoints.guarded_server import CurrentCall, current_call
from penstock.endpoints.http import schemas as gateway_schemas
from penstock.endpoints.http.api_reference import create_reference_routes
from penstock.endpoints.http.cors import add_cors
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.endpoints.http.openapi import Admit, build_openapi_document, build_schemas, create_router, list_models
from penstock.endpoints.http.refusals import PATH_CHARS, create_routed_app, refuse_call
from penstock.features.admin import admin_schemas as schemas
from penstock.features.admin.admin_rest import CALLS, build_call_routes
from penstock.features.admin.manager_calls import ClusterCalls
from penstock.features.admin.models_rest import MODEL_SCHEMA, ModelsRest
from penstock.features.admin.watch_rest import WatchRest
from penstock.pb.v1 import registry_pb2

log = structlog.get_logger()
ERRORS: tuple[type[BaseModel], ...] = (gateway_schemas.OpenAiError, gateway_schemas.Error)


def build_cluster_app(calls: ClusterCalls, version: str, admit: Admit, registry: object = None) -> FastAPI:
    """Build the administration's application.

    `registry` adds the routes of the model registry. Only a manager's endpoint has these routes and documentation
    pages.
    """
    app = create_routed_app(f"{SERVER_NAME} administration", version, "the cluster has its own at /v1/admin/watch")
    routers = build_cluster_routers(calls, admit, registry)
    if registry is not None:
        routers.append(create_reference_routes(partial(build_cluster_document, app), admit))
    for router in routers:
        for route in router.routes:
            get_declared_needs(getattr(route, "endpoint", route))  # raises if a route declares no permission
        app.include_router(router)
    return app


def build_cluster_routers(calls: ClusterCalls, admit: Admit, registry: object = None) -> list[APIRouter]:
    routers = [create_router(ModelsRest(calls), "Cluster", admit), *build_call_routes(calls, admit)]
    if registry is not None:
        routers.append(create_router(registry, "Model registry", admit))
    return [*routers, WatchRest(calls, admit).router()]


async def build_cluster_document(app: FastAPI) -> dict[str, Any]:
    models = [*list_models(schemas), *ERRORS]
    resources = [call.answer_type for table in CALLS.values() for call in table if call.status != 204]
    answers = build_schemas(*resources, registry_pb2.ModelVersion.DESCRIPTOR)
    return await asyncio.to_thread(build_openapi_document, app, models, {**answers, "Model": MODEL_SCHEMA})


class ManagerApp:
    """Serves a manager's HTTP requests: the administration, behind the guard that authenticates callers."""

    def __init__(self, http_guard: HttpGuard, build: Callable[[Admit], FastAPI]) -> None:
        self._http_guard = http_guard
        self._app = add_cors(http_guard.origins, build(self.admit))

    def admit(self, connection: HTTPConnection, needs: Needs) -> Principal:
        scope = connection.scope
        principal = self._http_guard.admit_scope(scope, needs)
        current_call.set(CurrentCall(principal, f"{scope.get('method', 'GET')} {scope['path'][:PATH_CHARS]}"))
        return principal

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        refusal = self._http_guard.find_refusal(scope["headers"], scope.get("method", ""))
        if refusal is not None:
            await refuse_call(refusal, scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            log.debug("client_left", path=scope["path"][:PATH_CHARS])
