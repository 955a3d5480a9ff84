"""A role's health door over HTTP: whether it lives, whether it is ready, its metrics. It takes little of anybody."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from penstock.core.errors import BUG, InternalError, PenstockError
from penstock.core.principals import MEASURING
from penstock.gateway import statuses
from penstock.gateway.http.doorman import Doorman
from penstock.telemetry.metrics import as_text

log = structlog.get_logger()
MAX_CONNECTIONS = 64
# Its first line and headers are few, and no answer takes long.
LIMITS = {"max_header_bytes": 8 * 1024, "header_timeout_s": 5.0, "answer_timeout_s": 10.0, "idle_timeout_s": 10.0}


class HealthApp:
    def __init__(
        self, doorman: Doorman, problem: Callable[[], Awaitable[str]], registry: Callable[[], CollectorRegistry]
    ) -> None:
        """`problem` says why the role is not ready, or nothing."""
        self._doorman = doorman
        self._problem = problem
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope)
        except PenstockError as error:
            answer = _refused(error)
        except Exception:
            log.exception("bug", where="health door")
            answer = _refused(InternalError(BUG))
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope) -> Response:
        if refusal := self._doorman.refusal(scope["headers"], scope.get("method", "")):
            raise refusal
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return JSONResponse({"error": "only GET is answered here"}, 405)
        match scope["path"]:
            case "/healthz" | "/livez":
                return JSONResponse({"status": "alive"})
            case "/readyz":
                problem = await self._problem()
                told = {"status": "not ready", "reason": problem} if problem else {"status": "ready"}
                return JSONResponse(told, 503 if problem else 200)
            case "/metrics":
                self._doorman.admit_scope(scope, MEASURING)
                registry = self._registry()
                text = await asyncio.to_thread(as_text, registry)  # reads a file for each process and metric
                return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
            case _:
                return JSONResponse({"error": "there are /healthz, /readyz and /metrics"}, 404)


def _refused(error: PenstockError) -> Response:
    return JSONResponse({"error": statuses.told(error)}, statuses.http_code(error), statuses.headers(error))
