"""What pages of other origins may use, where a setting allows them: nothing else (CORS)."""

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")  # that pages of allowed origins may use
EXPOSED = (
    "etag",
    "location",
    "penstock-code",
    "penstock-limit",
    "retry-after",
    "retry-after-ms",
    "ratelimit",
    "ratelimit-policy",
    "x-request-id",
    "inference-header-content-length",
)


def shared_with(origins: Collection[str], app: ASGIApp) -> ASGIApp:
    """The same application where no origin is allowed."""
    if not origins:
        return app
    return CORSMiddleware(app, tuple(origins), METHODS, ("*",), allow_private_network=True, expose_headers=EXPOSED)
