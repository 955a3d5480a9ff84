"""For operators: metrics, health and status; routing, the response cache and sessions, also to be changed."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from fastapi import Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from pydantic import ValidationError

from penstock.core.error_text import first_problem
from penstock.core.errors import InvalidRequest
from penstock.core.principals import CHANGING, MEASURING, NOBODY, PUBLIC
from penstock.core.settings import Routing
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http import schemas
from penstock.gateway.http.calls import RestCalls
from penstock.gateway.http.message import prefers_json
from penstock.gateway.http.openapi import Route, json_answer, path_names, principal_of
from penstock.serving.serve import Serving
from penstock.telemetry.metrics import as_json, as_text

T = TypeVar("T")
ROUTING = "/v1/models/{model}/routing"


class SharedReading(Generic[T]):
    """Reads off the event loop, for all that ask meanwhile at once: metrics are a file for each process and kind, and
    many who ask for them must not take all threads."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._reading: asyncio.Task[T] | None = None

    async def read(self) -> T:
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(self._read), name="read-metrics")
            self._reading.add_done_callback(self._end)
        return await asyncio.shield(self._reading)

    def _end(self, reading: asyncio.Task[T]) -> None:
        self._reading = None


class AdminRest:
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
        self._text = SharedReading(lambda: as_text(metrics_registry()))
        self._json = SharedReading(lambda: json_answer(as_json(metrics_registry())))

    @Route(
        "GET",
        "/metrics",
        "Prometheus metrics; JSON where Accept prefers application/json",
        needs=MEASURING,
        answer=schemas.Metrics,
        binary_answer={"text/plain": {"schema": {"type": "string"}}},
    )
    async def metrics(self, request: Request) -> Response:
        if prefers_json(request.headers.get("accept", ""), "text/plain", "application/openmetrics-text"):
            return await self.metrics_json(request)
        return Response(await self._text.read(), headers={"content-type": CONTENT_TYPE_LATEST})

    @Route("GET", "/metrics.json", "The same as JSON", needs=MEASURING, answer=schemas.Metrics)
    async def metrics_json(self, request: Request) -> Response:
        return await self._json.read()

    @Route(
        "GET",
        "/healthz",
        "200 while the process answers",
        "Whether requests should be sent here: /v2/health/ready.",
        needs=PUBLIC,
        answer=schemas.HealthAnswer,
    )
    async def health(self, request: Request) -> Response:
        return json_answer({"status": "alive"})

    @Route(
        "GET",
        "/readyz",
        "200 where requests should be sent here; else 503, and why",
        needs=PUBLIC,
        answer=schemas.Readyz,
    )
    async def readiness(self, request: Request) -> Response:
        if problem := self._catalogue.unreadiness():
            reason = {} if principal_of(request) is NOBODY else {"reason": problem}  # it names models
            return json_answer({"status": "not ready", **reason}, 503)
        return json_answer({"status": "ready"})

    @Route("GET", "/v1/status", "What runs, where, how much waits", needs=MEASURING, answer=schemas.Status)
    async def status(self, request: Request) -> Response:
        generation = await self._catalogue.generation()
        shown = {**self._catalogue.status(), "limits": self._serving.meter.status(), "generation": generation}
        return json_answer(shown)

    @Route(
        "GET",
        ROUTING,
        "How a model's requests find their worker, and how its workers stand",
        needs=MEASURING,
        answer=schemas.ModelRouting,
        query={"key": "which worker this key belongs to, where the policy is hash"},
    )
    async def routing(self, request: Request) -> Response:
        model, _ = path_names(request)
        return json_answer(self._catalogue.routing(model, principal_of(request), request.query_params.get("key", "")))

    @Route(
        "PUT",
        ROUTING,
        "Route a model's requests otherwise, at once and on every gateway",
        "Kept over restarts, until DELETE gives the model its own routing back.",
        needs=CHANGING,
        body=schemas.RoutingBody,
        answer=schemas.Empty,
    )
    async def set_routing(self, request: Request) -> Response:
        model, _ = path_names(request)
        body = await self._calls.body(request)
        try:
            routing = Routing.model_validate_json(body)
        except ValidationError as error:
            raise InvalidRequest(f"{first_problem(error, 'the body')}; see docs/routing.md") from error
        await self._catalogue.set_routing(model, routing, principal_of(request))
        return json_answer({})

    @Route("DELETE", ROUTING, "Route as model.yaml says", needs=CHANGING, answer=schemas.Empty)
    async def reset_routing(self, request: Request) -> Response:
        model, _ = path_names(request)
        await self._catalogue.set_routing(model, None, principal_of(request))
        return json_answer({})

    @Route("GET", "/v1/cache", "What the response cache holds", needs=MEASURING, answer=schemas.CacheStatus)
    async def cache(self, request: Request) -> Response:
        return json_answer(self._serving.cache.statistics())

    @Route(
        "DELETE",
        "/v1/cache",
        "Forget cached answers",
        needs=CHANGING,
        answer=schemas.Empty,
        query={"model": "of this model alone"},
    )
    async def clear_cache(self, request: Request) -> Response:
        model, principal = request.query_params.get("model", ""), principal_of(request)
        if not model and not principal.is_bound:
            await self._serving.cache.delete()
            return json_answer({})
        if model:
            self._serving.resolver.resolve(model, "", principal)  # raises for one that is not there
        for block in self._serving.resolver.blocks(principal):
            if model in ("", block.model):
                await self._serving.cache.delete(block.block_id)
        return json_answer({})

    @Route("GET", "/v1/sessions", "How many sessions there are", needs=MEASURING, answer=schemas.SessionCounts)
    async def sessions(self, request: Request) -> Response:
        return json_answer(self._serving.sessions.statistics())
