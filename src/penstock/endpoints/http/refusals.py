"""The answers of an HTTP application to requests that are refused or fail."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket

from penstock.core.errors import BUG_MESSAGE, InternalError, PenstockError, RateLimited
from penstock.core.generation import CONTEXT_LENGTH
from penstock.endpoints import statuses
from penstock.endpoints.http.http_message import ClientLeft, Receive, Scope, Send
from penstock.endpoints.http.openapi import OPENAI_PREFIX, make_json_answer

PATH_CHARS = 200  # of the request's path in an error message
OPENAI_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}


def create_routed_app(title: str, version: str, websockets: str) -> FastAPI:
    """Return a FastAPI application with Penstock's errors and without documentation pages.

    `websockets` is a hint for the error at unknown WebSocket paths.
    """
    handlers: dict[int | type[Exception], Any] = {
        PenstockError: answer_error,
        HTTPException: _answer_routing_error,
        ClientLeft: _answer_client_left,
        Exception: _answer_bug,
    }
    app = FastAPI(
        title=title,
        version=version,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=handlers,
    )

    async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            raise HTTPException(404)
        message = f"there is no WebSocket at {scope['path'][:PATH_CHARS]}; {websockets}"
        await WebSocket(scope, receive, send).send_denial_response(make_json_answer({"error": message}, 404))

    app.router.default = not_found
    return app


async def refuse_call(error: PenstockError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request or a WebSocket with an error, before routing."""
    answer = await answer_error(HTTPConnection(scope), error)
    await answer(scope, receive, send)


async def answer_error(request: HTTPConnection, error: Any) -> Response:
    headers = statuses.make_headers(error)
    if not error.is_retryable:
        headers["x-should-retry"] = "false"  # OpenAI's clients would try a 429 again
    if isinstance(error, RateLimited) and _is_openai(request):
        headers |= statuses.make_openai_limit_headers(error.limit_statuses)
    if error.reason == "offset":  # for clients of tus uploads
        headers |= {"tus-resumable": "1.0.0", "upload-offset": error.fields.get("offset", "")}
    if error.reason == "tus_version":
        headers["tus-version"] = "1.0.0"
    if hasattr(request.state, "request_id"):
        headers["x-request-id"] = request.state.request_id
    if _is_openai(request):
        return make_json_answer(make_openai_error(error), statuses.get_openai_code(error), headers)
    return make_json_answer({"error": statuses.make_public_message(error)}, statuses.get_http_code(error), headers)


def make_openai_error(error: PenstockError) -> dict[str, object]:
    """Return an error in the JSON of OpenAI's API, for an answer or an event of a stream."""
    code = CONTEXT_LENGTH if error.reason == CONTEXT_LENGTH else error.code
    return _make_openai_content(
        statuses.get_openai_code(error), code, statuses.make_public_message(error), error.fields.get("parameter")
    )


async def _answer_routing_error(request: Request, error: Any) -> Response:
    path = request.url.path[:PATH_CHARS]
    if error.status_code == 405:
        message = f"{path} does not support {request.method[:PATH_CHARS]}; /docs lists all routes"
    elif error.status_code == 404:
        message = f"there is no {path}; /docs lists all routes"
    else:
        message = str(error.detail)
    code = {404: "unknown_route", 405: "wrong_method"}.get(error.status_code, "invalid_request")
    content = _make_openai_content(error.status_code, code, message) if _is_openai(request) else {"error": message}
    return make_json_answer(content, error.status_code, dict(error.headers or {}))


async def _answer_bug(request: Request, error: Exception) -> Response:
    return await answer_error(request, InternalError(BUG_MESSAGE))


async def _answer_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # never received; only for logs


def _is_openai(request: HTTPConnection) -> bool:
    found: bool = request.scope["path"].startswith(OPENAI_PREFIX)
    return found


def _make_openai_content(status: int, code: str, message: str, param: str | None = None) -> dict[str, object]:
    kind = OPENAI_ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}
