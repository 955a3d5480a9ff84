"""What an HTTP application answers where something is refused or fails."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from penstock.core.errors import BUG, InternalError, PenstockError, RateLimited
from penstock.gateway import statuses
from penstock.gateway.http.message import ClientLeft
from penstock.gateway.http.openapi import OPENAI, json_answer

PATH_CHARS = 200  # of what a caller asked for and is told
OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}


def answer_failures(app: FastAPI) -> None:
    app.add_exception_handler(PenstockError, penstock_error)
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(ClientLeft, _client_left)
    app.add_exception_handler(Exception, _bug)


async def penstock_error(request: HTTPConnection, error: Any) -> Response:
    headers = statuses.headers(error)
    if not error.is_retryable:
        headers["x-should-retry"] = "false"  # OpenAI's clients would try a 429 again
    if isinstance(error, RateLimited) and request.scope["path"].startswith(OPENAI):
        headers |= statuses.openai_limit_headers(error.standings)
    if error.reason == "offset":  # as tus tells it
        headers |= {"tus-resumable": "1.0.0", "upload-offset": error.fields.get("offset", "")}
    if hasattr(request.state, "request_id"):
        headers["x-request-id"] = request.state.request_id
    return _error(request, statuses.http_code(error), error.code, statuses.told(error), headers)


async def _routing_error(request: Request, error: Any) -> Response:
    path = request.url.path[:PATH_CHARS]
    if error.status_code == 405:
        message = f"{request.method[:PATH_CHARS]} is not for {path}; /docs lists what is"
    elif error.status_code == 404:
        message = f"there is no {path}; /docs lists what there is"
    else:
        message = str(error.detail)
    code = {404: "unknown_route", 405: "wrong_method"}.get(error.status_code, "invalid_request")
    return _error(request, error.status_code, code, message, dict(error.headers or {}))


async def _bug(request: Request, error: Exception) -> Response:
    return await penstock_error(request, InternalError(BUG))


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody hears it


def _error(request: HTTPConnection, status: int, code: str, message: str, headers: dict[str, str]) -> Response:
    path = request.scope["path"]
    if not path.startswith(OPENAI):
        return json_answer({"error": message}, status, headers)
    kind = OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return json_answer({"error": {"message": message, "type": kind, "code": code, "param": None}}, status, headers)
