"""The HTTP health endpoint of a server process: liveness, readiness and metrics, with small limits for every caller."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from penstock.core.errors import BUG_MESSAGE, InternalError, PenstockError
from penstock.core.principals import METRICS_SCOPES
from penstock.endpoints import statuses
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.telemetry.metrics import format_as_text

log = structlog.get_logger()
MAX_CONNECTIONS = 64
# Requests to this endpoint are small, and their answers are fast.
LIMITS = {"max_header_bytes": 8 * 1024, "header_timeout_s": 5.0, "answer_timeout_s": 10.0, "idle_timeout_s": 10.0}


class HealthApp:
    def __init__(
        self,
        http_guard: HttpGuard,
        find_problem: Callable[[], Awaitable[str]],
        get_registry: Callable[[], CollectorRegistry],
    ) -> None:
        """Create the application. `find_problem` returns why the process is not ready, or an empty string."""
        self._http_guard = http_guard
        self._find_problem = find_problem
        self._get_registry = get_registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope)
        except PenstockError as error:
            answer = _make_refusal(error)
        except Exception:
            log.exception("bug", where="health endpoint")
            answer = _make_refusal(InternalError(BUG_MESSAGE))
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope) -> Response:
        if refusal := self._http_guard.find_refusal(scope["headers"], scope.get("method", "")):
            raise refusal
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return JSONResponse({"error": "only GET and HEAD are supported here"}, 405)
        match scope["path"]:
            case "/healthz" | "/livez":
                return JSONResponse({"status": "alive"})
            case "/readyz":
                problem = await self._find_problem()
                content = {"status": "not ready", "reason": problem} if problem else {"status": "ready"}
                return JSONResponse(content, 503 if problem else 200)
            case "/metrics":
                self._http_guard.admit_scope(scope, METRICS_SCOPES)
                registry = self._get_registry()
                text = await asyncio.to_thread(format_as_text, registry)  # reads a file per process and metric
                return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
            case _:
                return JSONResponse({"error": "unknown path: use /healthz, /readyz or /metrics"}, 404)


def _make_refusal(error: PenstockError) -> Response:
    return JSONResponse(
        {"error": statuses.make_public_message(error)}, statuses.get_http_code(error), statuses.make_headers(error)
    )
