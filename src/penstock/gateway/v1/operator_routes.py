"""The routes for operators: metrics, health and status; routing, response cache and sessions."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from fastapi import Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from pydantic import ValidationError

from penstock.core.config import SERVER_NAME
from penstock.core.error_text import describe_first_problem
from penstock.core.errors import InvalidRequest
from penstock.core.principals import ADMIN_SCOPES, ANY_SCOPE, METRICS_SCOPES, NO_SCOPES, NOBODY
from penstock.core.settings import Routing
from penstock.endpoints.http import schemas
from penstock.endpoints.http.http_message import prefers_json
from penstock.endpoints.http.openapi import Route, get_principal, make_json_answer, read_path_names
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http_calls import RestCalls
from penstock.serving.serve import Serving
from penstock.telemetry.metrics import format_as_json, format_as_text

T = TypeVar("T")
ROUTING_PATH = "/v1/models/{model}/routing"


class SharedReading(Generic[T]):
    """Reads in a thread, and returns the result of one read to all concurrent callers.

    Metrics are many files, one per process and kind, so concurrent requests for them must not occupy all threads.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._reading: asyncio.Task[T] | None = None

    async def read(self) -> T:
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(self._read), name="read-metrics")
            self._reading.add_done_callback(self._end_reading)
        return await asyncio.shield(self._reading)

    def _end_reading(self, reading: asyncio.Task[T]) -> None:
        self._reading = None


class OperatorRest:
    def __init__(
        self,
        serving: Serving,
        catalogue: Catalogue,
        calls: RestCalls,
        metrics_registry: Callable[[], CollectorRegistry],
    ) -> None:
        self._serving = serving
        self._catalogue = catalogue
        self._calls = calls
        self._text = SharedReading(lambda: format_as_text(metrics_registry()))
        self._json = SharedReading(lambda: make_json_answer(format_as_json(metrics_registry())))

    @Route(
        "GET",
        "/metrics",
        "Prometheus metrics; as JSON if `Accept` prefers application/json",
        needs=METRICS_SCOPES,
        answer=schemas.Metrics,
        binary_answer={"text/plain": {"schema": {"type": "string"}}},
    )
    async def metrics(self, request: Request) -> Response:
        if prefers_json(request.headers.get("accept", ""), "text/plain", "application/openmetrics-text"):
            return await self.metrics_json(request)
        return Response(await self._text.read(), headers={"content-type": CONTENT_TYPE_LATEST})

    @Route("GET", "/metrics.json", "Prometheus metrics as JSON", needs=METRICS_SCOPES, answer=schemas.Metrics)
    async def metrics_json(self, request: Request) -> Response:
        return await self._json.read()

    @Route(
        "GET",
        "/healthz",
        "Liveness: 200 while the process answers",
        "Readiness is at /readyz and /v2/health/ready.",
        needs=NO_SCOPES,
        answer=schemas.HealthAnswer,
    )
    async def health(self, request: Request) -> Response:
        return make_json_answer({"status": "alive"})

    @Route(
        "GET",
        "/readyz",
        "Readiness: 200 if this server accepts requests, otherwise 503 with the reason",
        needs=NO_SCOPES,
        answer=schemas.Readyz,
    )
    async def readiness(self, request: Request) -> Response:
        if problem := self._catalogue.explain_unreadiness():
            reason = {} if get_principal(request) is NOBODY else {"reason": problem}  # the problem may name models
            return make_json_answer({"status": "not ready", **reason}, 503)
        return make_json_answer({"status": "ready"})

    @Route(
        "GET",
        "/v1/server",
        "Name, version and gRPC port of this server",
        "Commands with the HTTP address of a server find its gRPC address with this route.",
        needs=ANY_SCOPE,
        answer=schemas.FoundServer,
    )
    async def server(self, request: Request) -> Response:
        found = {"name": SERVER_NAME, "version": self._catalogue.server_version}
        return make_json_answer(found | {"grpc_port": self._catalogue.grpc_port})

    @Route(
        "GET",
        "/v1/status",
        "Status of blocks, workers, devices and queues",
        needs=METRICS_SCOPES,
        answer=schemas.Status,
    )
    async def status(self, request: Request) -> Response:
        generation = await self._catalogue.collect_generation_counts()
        status = {
            **self._catalogue.describe_status(),
            "limits": self._serving.meter.get_status(),
            "generation": generation,
        }
        return make_json_answer(status)

    @Route(
        "GET",
        ROUTING_PATH,
        "A model's routing, and the state of its workers",
        needs=METRICS_SCOPES,
        answer=schemas.ModelRouting,
        query={"key": "Also return the worker of this key, if the policy is hash"},
    )
    async def routing(self, request: Request) -> Response:
        model, _ = read_path_names(request)
        return make_json_answer(
            self._catalogue.describe_model_routing(model, get_principal(request), request.query_params.get("key", ""))
        )

    @Route(
        "PUT",
        ROUTING_PATH,
        "Override a model's routing on every gateway",
        "The override takes effect at once and survives restarts. DELETE removes it.",
        needs=ADMIN_SCOPES,
        body=schemas.RoutingBody,
        answer=schemas.Empty,
    )
    async def set_routing(self, request: Request) -> Response:
        model, _ = read_path_names(request)
        body = await self._calls.read_body(request)
        try:
            routing = Routing.model_validate_json(body)
        except ValidationError as error:
            raise InvalidRequest(f"{describe_first_problem(error, 'the body')}; see docs/routing.md") from error
        await self._catalogue.set_routing(model, routing, get_principal(request))
        return make_json_answer({})

    @Route("DELETE", ROUTING_PATH, "Remove the override of a model's routing", needs=ADMIN_SCOPES, answer=schemas.Empty)
    async def reset_routing(self, request: Request) -> Response:
        model, _ = read_path_names(request)
        await self._catalogue.set_routing(model, None, get_principal(request))
        return make_json_answer({})

    @Route("GET", "/v1/cache", "Size of the response cache", needs=METRICS_SCOPES, answer=schemas.CacheStatus)
    async def cache(self, request: Request) -> Response:
        return make_json_answer(self._serving.cache.statistics())

    @Route(
        "DELETE",
        "/v1/cache",
        "Clear the response cache",
        needs=ADMIN_SCOPES,
        answer=schemas.Empty,
        query={"model": "Clear only the answers of this model"},
    )
    async def clear_cache(self, request: Request) -> Response:
        model, principal = request.query_params.get("model", ""), get_principal(request)
        if not model and not principal.is_restricted:
            await self._serving.cache.delete()
            return make_json_answer({})
        if model:
            self._serving.resolver.resolve(model, "", principal)  # raises UnknownModel
        for block in self._serving.resolver.list_blocks(principal):
            if model in ("", block.model):
                await self._serving.cache.delete(block.block_id)
        return make_json_answer({})

    @Route("GET", "/v1/sessions", "Number of sessions", needs=METRICS_SCOPES, answer=schemas.SessionCounts)
    async def sessions(self, request: Request) -> Response:
        return make_json_answer(self._serving.sessions.count_sessions())
