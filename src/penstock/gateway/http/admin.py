"""For operators: metrics, health and status."""

import asyncio
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http import schemas
from penstock.gateway.http.message import prefers_json
from penstock.gateway.http.openapi import Route, json_answer
from penstock.telemetry.metrics import as_json, as_text


class AdminRest:
    def __init__(self, catalogue: Catalogue, metrics_registry: Callable[[], CollectorRegistry]) -> None:
        self._catalogue = catalogue
        self._metrics_registry = metrics_registry

    @Route(
        "GET",
        "/metrics",
        "Prometheus metrics; JSON where Accept prefers application/json",
        answer=schemas.Metrics,
        binary_answer={"text/plain": {"schema": {"type": "string"}}},
    )
    async def metrics(self, request: Request) -> Response:
        if prefers_json(request.headers.get("accept", ""), "text/plain", "application/openmetrics-text"):
            return await self.metrics_json(request)
        # Reads a file for each process and metric: off the event loop.
        text = await asyncio.to_thread(lambda: as_text(self._metrics_registry()))
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    @Route("GET", "/metrics.json", "The same as JSON", answer=schemas.Metrics)
    async def metrics_json(self, request: Request) -> Response:
        return json_answer(await asyncio.to_thread(lambda: as_json(self._metrics_registry())))

    @Route(
        "GET",
        "/healthz",
        "200 where requests can be served, else 503",
        "For liveness alone, ask /v2/health/live.",
        answer=schemas.HealthAnswer,
    )
    async def health(self, request: Request) -> Response:
        if self._catalogue.is_server_ready():
            return json_answer({"status": "ready"})
        return json_answer({"status": "not ready", "error": "the server is not ready"}, 503)

    @Route("GET", "/v1/status", "What runs, where, how much waits", answer=schemas.Status)
    async def status(self, request: Request) -> Response:
        return json_answer(self._catalogue.status())
