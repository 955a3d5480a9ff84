"""CORS headers for web pages from the origins in the setting `allowed_origins`."""

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
EXPOSED_HEADERS = (
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


def add_cors(origins: Collection[str], app: ASGIApp) -> ASGIApp:
    """Wrap the application in CORS handling; return it unchanged if no origin is allowed."""
    if not origins:
        return app
    return CORSMiddleware(
        app, tuple(origins), METHODS, ("*",), allow_private_network=True, expose_headers=EXPOSED_HEADERS
    )
