"""From an error to what a protocol says. The only place that knows transport codes, and by which messages leave."""

from collections.abc import Mapping
from math import ceil

import grpc

from penstock.core.error_text import for_clients
from penstock.core.errors import PenstockError

_CODES: Mapping[str, tuple[grpc.StatusCode, int]] = {
    "invalid_request": (grpc.StatusCode.INVALID_ARGUMENT, 400),
    "unknown_model": (grpc.StatusCode.NOT_FOUND, 404),
    "invalid_tensor": (grpc.StatusCode.INVALID_ARGUMENT, 400),
    "invalid_image": (grpc.StatusCode.INVALID_ARGUMENT, 400),
    "headers_too_large": (grpc.StatusCode.RESOURCE_EXHAUSTED, 431),
    "too_slow": (grpc.StatusCode.DEADLINE_EXCEEDED, 408),
    "session_error": (grpc.StatusCode.INVALID_ARGUMENT, 400),
    "unauthenticated": (grpc.StatusCode.UNAUTHENTICATED, 401),
    "forbidden": (grpc.StatusCode.PERMISSION_DENIED, 403),
    "unknown_host": (grpc.StatusCode.INVALID_ARGUMENT, 421),
    "refused": (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    "request_too_large": (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    "queue_full": (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    "queue_timeout": (grpc.StatusCode.UNAVAILABLE, 503),
    "overloaded": (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    "rate_limited": (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    "unavailable": (grpc.StatusCode.UNAVAILABLE, 503),
    "model_not_ready": (grpc.StatusCode.UNAVAILABLE, 503),
    "draining": (grpc.StatusCode.UNAVAILABLE, 503),
    "session_moved": (grpc.StatusCode.UNAVAILABLE, 503),
    "gateway_lost": (grpc.StatusCode.UNAVAILABLE, 503),
    "worker_lost": (grpc.StatusCode.UNAVAILABLE, 503),
    "not_leader": (grpc.StatusCode.UNAVAILABLE, 503),
    "store_unavailable": (grpc.StatusCode.UNAVAILABLE, 503),
    "lease_lost": (grpc.StatusCode.UNAVAILABLE, 503),
    "compacted": (grpc.StatusCode.UNAVAILABLE, 503),
    "corrupted": (grpc.StatusCode.DATA_LOSS, 422),
    "conflict": (grpc.StatusCode.ABORTED, 409),
    "name_taken": (grpc.StatusCode.ALREADY_EXISTS, 409),
    "deadline_exceeded": (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    "cancelled": (grpc.StatusCode.CANCELLED, 499),
    "engine_failed": (grpc.StatusCode.INTERNAL, 500),
    "wire_error": (grpc.StatusCode.INTERNAL, 500),
    "config_error": (grpc.StatusCode.FAILED_PRECONDITION, 400),
    "internal": (grpc.StatusCode.INTERNAL, 500),
}
# What browsers understand comes first: they ask their user, and send the answer with all that follows.
ASK_FOR_KEY = 'Basic realm="penstock", Bearer'


def grpc_code(error: PenstockError) -> grpc.StatusCode:
    return _CODES[error.code][0]


def http_code(error: PenstockError) -> int:
    return _CODES[error.code][1]


def told(error: PenstockError) -> str:
    """What the caller hears of it."""
    return for_clients(error.message)


def headers(error: PenstockError) -> dict[str, str]:
    """Sent with the error over HTTP, and as trailing metadata over gRPC."""
    found = {"penstock-code": error.code}
    if error.code == "unauthenticated":
        found["www-authenticate"] = ASK_FOR_KEY
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        found["retry-after"] = str(ceil(retry_after_s))
    return found
