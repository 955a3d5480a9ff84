"""Lists every method and route of a cluster, from reflection, OpenAPI and the code, with the required scopes."""

import json
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry
from starlette.routing import WebSocketRoute

import penstock
from penstock.core.config import Limits
from penstock.core.principals import ANY_SCOPE, METRICS_SCOPES, NO_SCOPES, Needs, Scope
from penstock.endpoints.guard import get_declared_needs
from penstock.features.admin.apps import build_cluster_routers
from penstock.features.registry.registry_rest import RegistryRest
from penstock.gateway.http_app import build_http_app
from penstock.pb.blocks import inference_pb2
from penstock.pb.inference import grpc_service_pb2
from penstock.pb.v1 import access_pb2, cluster_pb2, leader_pb2, manager_pb2, registry_pb2

FILES: tuple[Any, ...] = (
    *(each.DESCRIPTOR for each in (access_pb2, cluster_pb2, leader_pb2, manager_pb2, registry_pb2)),
    grpc_service_pb2.DESCRIPTOR,
    inference_pb2.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
)
OF_OTHERS = {"grpc.health.v1.Health": NO_SCOPES, "grpc.reflection.v1alpha.ServerReflection": ANY_SCOPE}
# Methods that everybody may call; any other method that a server answers without a key is a finding.
FOR_ALL = frozenset(
    (
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.health.v1.Health/List",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
        "GET /healthz",
        "GET /livez",
        "GET /readyz",
        "GET /v2/health/live",
        "GET /v2/health/ready",
    )
)
HTTP_METHODS = frozenset(("get", "put", "post", "delete", "patch", "head", "options"))
HEALTH_ROUTES = ("/healthz", "/livez", "/readyz")
WEBSOCKET = "WEBSOCKET"
UNKNOWN = frozenset({Scope.ADMIN})  # methods without a declaration must be refused


@dataclass(frozen=True, slots=True)
class EndpointToTry:
    place: str  # gateway, manager, registry or worker
    name: str  # /package.Service/Method, or METHOD /path
    needs: Needs
    method: Any = None  # descriptor of a gRPC method, if known

    @property
    def is_for_all(self) -> bool:
        return self.name in FOR_ALL

    def __str__(self) -> str:
        return f"{self.place} {self.name}"


# --- gRPC


def list_grpc_endpoints(place: str, found: Iterable[str] = ()) -> Iterator[EndpointToTry]:
    """Return the methods of all services; servers refuse unknown methods. `found` was listed by reflection."""
    declared = list_declared_methods("manager" if place.startswith("manager") else "gateway")
    known = {f"/{service.full_name}/{method.name}": method for service in _services() for method in service.methods}
    for name in sorted({*known, *found}):
        service = name.split("/")[1]
        if service.endswith("ServerReflection"):
            needs = ANY_SCOPE
        else:
            needs = OF_OTHERS.get(service) or (NO_SCOPES if service in OF_OTHERS else declared.get(name, UNKNOWN))
        yield EndpointToTry(place, name, needs, known.get(name))


def list_declared_methods(package: str) -> Mapping[str, Needs]:
    """Map each method to the scopes declared beside it, in the class that serves it."""
    services = {service.name: service for service in _services()}
    found: dict[str, Needs] = {}
    for answering in [*_classes(package), *_classes("features")]:
        names = [each.__name__.removesuffix("Servicer") for each in answering.__mro__]
        own = [services[name] for name in names if name in services]
        if bool(own) != (
            package == "manager"
        ):  # classes of managers inherit from gRPC's servicers, those of gateways do not
            continue
        for service in own or services.values():  # all method names of a gateway's class belong to one service
            for method in service.methods:
                needs = getattr(vars(answering).get(method.name), "needs", None)
                if needs is not None:
                    found[f"/{service.full_name}/{method.name}"] = needs
    return found


async def list_reflected_methods(channel: grpc.aio.Channel, headers: list[tuple[str, str]]) -> set[str]:
    """Return the methods that a server lists by reflection."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked: Any = reflection_pb2.ServerReflectionRequest

    async def tell(request: Any) -> Any:
        call = stub.ServerReflectionInfo(iter([request]), metadata=headers, timeout=30)
        return await anext(aiter(call))

    listed = await tell(asked(list_services=""))
    found: set[str] = set()
    for service in listed.list_services_response.service:
        answer = await tell(asked(file_containing_symbol=service.name))
        for text in answer.file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(text)
            of_package = f"{file.package}." if file.package else ""
            found |= {
                f"/{of_package}{each.name}/{method.name}"
                for each in file.service
                if f"{of_package}{each.name}" == service.name
                for method in each.method
            }
    return found


def _services() -> list[Any]:
    return [service for file in FILES for service in file.services_by_name.values()]


def _classes(package: str) -> Iterator[type]:
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if module.name.split(".")[1] != package:
            continue
        for value in vars(import_module(module.name)).values():
            if isinstance(value, type) and value.__module__ == module.name:
                yield value


# --- HTTP


def list_gateway_routes(document: bytes) -> list[EndpointToTry]:
    """Return the gateway's routes in its OpenAPI document, and the routes that the document omits."""
    http_guard = MagicMock(origins=())
    made = build_http_app(
        MagicMock(), MagicMock(), Limits(), CollectorRegistry, http_guard, live=MagicMock(), memory=MagicMock()
    )
    app: Any = made
    found = {
        endpoint.name: endpoint
        for endpoint in (*list_documented_routes("gateway", document), *list_administration_routes("gateway"))
    }
    for route, needs in app.routes:
        for method in (WEBSOCKET,) if isinstance(route, WebSocketRoute) else route.methods:
            endpoint = EndpointToTry("gateway", f"{method} {route.path}", needs)
            found.setdefault(endpoint.name, endpoint)
    return list(found.values())


def list_documented_routes(place: str, document: bytes) -> Iterator[EndpointToTry]:
    for path, methods in json.loads(document)["paths"].items():
        for method, details in methods.items():
            if method not in HTTP_METHODS:
                continue
            scopes = {scope for each in details.get("security", ()) for scopes in each.values() for scope in scopes}
            yield EndpointToTry(place, f"{method.upper()} {path}", frozenset(map(Scope, scopes)))


def list_administration_routes(place: str) -> Iterator[EndpointToTry]:
    """Yield the administration routes. Gateways serve all of them except the model registry's."""
    registry = RegistryRest(MagicMock()) if place == "registry" else None
    for router in build_cluster_routers(MagicMock(), MagicMock(), registry):
        for route in router.routes:
            found: Any = route
            for method in (WEBSOCKET,) if isinstance(route, WebSocketRoute) else found.methods:
                yield EndpointToTry(place, f"{method} {found.path}", get_declared_needs(found.endpoint))


def list_health_routes(place: str) -> Iterator[EndpointToTry]:
    for path in HEALTH_ROUTES:
        yield EndpointToTry(place, f"GET {path}", NO_SCOPES)
    yield EndpointToTry(place, "GET /metrics", METRICS_SCOPES)
