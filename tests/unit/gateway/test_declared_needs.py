"""Every gRPC method, route and WebSocket of the gateway declares its scopes, or is not served."""

from pathlib import Path
from typing import Any, cast

import pytest
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.routing import Route as PlainRoute
from starlette.routing import WebSocketRoute

from penstock.core.config import Limits
from penstock.core.principals import (
    ADMIN_SCOPES,
    ANY_SCOPE,
    INFERENCE_SCOPES,
    METRICS_SCOPES,
    NO_SCOPES,
    VIEW_SCOPES,
    Needs,
    Scope,
)
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.http.openapi import Route
from penstock.gateway.gateway_grpc import SERVICE, GrpcServer
from penstock.gateway.oip.grpc_service import OipGrpc
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.shared_memory.shared_memory_grpc import SharedMemoryGrpc
from penstock.pb.inference import grpc_service_pb2
from tests.unit.conftest import Served

METHODS: dict[str, Needs] = {
    **dict.fromkeys(("ServerLive", "ServerReady"), NO_SCOPES),
    **dict.fromkeys(("ModelInfer", "ModelStreamInfer"), INFERENCE_SCOPES),
    **dict.fromkeys(("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"), VIEW_SCOPES),
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), ADMIN_SCOPES),
    "ServerMetadata": ANY_SCOPE,
}
OPEN = {"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"}


def grpc_server(served: Served, tmp_path: Path, *further: object) -> GrpcServer:
    memory = SharedMemory(tmp_path)
    edge = OipGrpc(cast(Any, served.serving), served.catalogue, served.guard, memory)
    return GrpcServer(edge, Limits(), SharedMemoryGrpc(memory), *further)


async def test_every_grpc_method_declares_what_it_needs(served: Served, tmp_path: Path) -> None:
    declared = grpc_server(served, tmp_path).needs
    ours: Any = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for method in ours.methods:
        if method.full_name in declared:
            wanted = INFERENCE_SCOPES if "SharedMemory" in method.name else METHODS[method.name]
            assert declared[method.full_name] == wanted, method.name
    assert {name for name in METHODS if f"{SERVICE}.{name}" not in declared} == set()
    assert declared["grpc.health.v1.Health.Check"] == declared["grpc.health.v1.Health.Watch"] == NO_SCOPES
    assert declared["grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo"] == ANY_SCOPE


async def test_a_grpc_method_that_declares_nothing_is_not_served(served: Served, tmp_path: Path) -> None:
    class Further:
        async def TraceSetting(self, message: object, context: object, principal: object) -> None: ...

    with pytest.raises(TypeError, match="TraceSetting"):
        grpc_server(served, tmp_path, Further())
    Further.TraceSetting = needs_scope(Scope.ADMIN)(Further.TraceSetting)  # type: ignore[method-assign]
    assert grpc_server(served, tmp_path, Further()).needs[f"{SERVICE}.TraceSetting"] == ADMIN_SCOPES


def test_every_route_declares_what_it_needs(served: Served) -> None:
    found = {
        (getattr(route, "path", ""), tuple(getattr(route, "methods", ()))): needs for route, needs in served.app.routes
    }
    assert {path for (path, _), needs in found.items() if not needs} == OPEN
    for (path, methods), needs in found.items():
        if path.startswith("/v1/models/") and methods != ("GET",):
            assert needs == ADMIN_SCOPES
    assert found["/metrics", ("GET",)] == found["/v1/status", ("GET",)] == METRICS_SCOPES
    sockets = [needs for route, needs in served.app.routes if isinstance(route, WebSocketRoute)]
    assert sockets == [INFERENCE_SCOPES, INFERENCE_SCOPES]


def test_a_route_that_declares_nothing_is_not_served(served: Served) -> None:
    async def answer(request: Request) -> Response:
        return Response()

    with pytest.raises(TypeError):
        Route("GET", "/x", "Something new")  # type: ignore[call-arg]
    router = APIRouter()
    router.add_api_route("/x", answer)
    for route in (router.routes[0], PlainRoute("/x", answer), WebSocketRoute("/x", cast(Any, answer))):
        with pytest.raises(TypeError, match="declares no scopes"):
            type(served.app)(served.app.infer, cast(Any, None), served.app.http_guard, cast(Any, None), [route])
