"""Transport codes, headers and public messages of errors. Only this module maps errors to protocols."""

from collections.abc import Mapping, Sequence
from math import ceil

import grpc

from penstock.core.error_text import clean_for_clients
from penstock.core.errors import PenstockError, RateLimited
from penstock.core.generation import CONTEXT_LENGTH
from penstock.core.principals import LimitStatus

_CODES: Mapping[str, tuple[grpc.StatusCode, int]] = {
    "invalid_request": (grpc.StatusCode.INVALID_ARGUMENT, 400),
    "unknown_model": (grpc.StatusCode.NOT_FOUND, 404),
    "other_cluster": (grpc.StatusCode.FAILED_PRECONDITION, 421),
    "not_found": (grpc.StatusCode.NOT_FOUND, 404),
    "no_match": (grpc.StatusCode.NOT_FOUND, 404),
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
    "device_out_of_memory": (grpc.StatusCode.RESOURCE_EXHAUSTED, 503),
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
    "precondition_failed": (grpc.StatusCode.FAILED_PRECONDITION, 412),
    "deadline_exceeded": (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    "cancelled": (grpc.StatusCode.CANCELLED, 499),
    "engine_failed": (grpc.StatusCode.INTERNAL, 500),
    "policy_failed": (grpc.StatusCode.INTERNAL, 500),
    "wire_error": (grpc.StatusCode.INTERNAL, 500),
    "config_error": (grpc.StatusCode.FAILED_PRECONDITION, 400),
    "internal": (grpc.StatusCode.INTERNAL, 500),
}
# Basic comes first because browsers ask their user for a Basic password and send it with all later requests. Chromium
# ignores all challenges if one of them has no parameter.
KEY_CHALLENGE = 'Basic realm="penstock", Bearer realm="penstock"'


def get_grpc_code(error: PenstockError) -> grpc.StatusCode:
    return _CODES[error.code][0]


def get_http_code(error: PenstockError) -> int:
    return _CODES[error.code][1]


def get_openai_code(error: PenstockError) -> int:
    """Return the HTTP code for OpenAI's API: 400 for a prompt that is too long, because its clients retry a 429."""
    return 400 if error.reason == CONTEXT_LENGTH else get_http_code(error)


def make_public_message(error: PenstockError) -> str:
    """Return the error's message for clients, without paths and tracebacks."""
    return clean_for_clients(error.message)


def make_headers(error: PenstockError) -> dict[str, str]:
    """Return the headers of an error over HTTP, which are the trailing metadata over gRPC."""
    found = {"penstock-code": error.code}
    if error.code == "unauthenticated":
        found["www-authenticate"] = KEY_CHALLENGE
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        found["retry-after"] = str(ceil(retry_after_s))
    if isinstance(error, RateLimited):
        found["retry-after-ms"] = str(ceil(1000 * error.retry_after_s))  # OpenAI's clients read this header
        found["penstock-limit"] = error.fields.get("limit", "")
        found |= make_limit_headers(error.limit_statuses, error.fields.get("limit", ""))
    return found


def make_details(error: PenstockError) -> dict[str, str | float]:
    """Return the fields that follow the error's code in a stream: the limit, and the seconds until a retry."""
    found: dict[str, str | float] = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        found["retry_after_s"] = retry_after_s
    if "limit" in error.fields:
        found["limit"] = error.fields["limit"]
    return found


def make_limit_headers(limit_statuses: Sequence[LimitStatus], refused: str = "") -> dict[str, str]:
    """Return the headers with a caller's limits.

    `ratelimit` and `ratelimit-policy`, from the IETF draft, list all limits. The older fields show one limit: the limit
    that refused the request, or otherwise the rate limit with the smallest remaining share.
    """
    if not limit_statuses:
        return {}
    least = min(limit_statuses, key=lambda each: (each.name != refused, not each.window_s, each.remaining / each.quota))
    limit, remaining, reset = str(least.quota), str(least.remaining), str(ceil(least.reset_s))
    return {
        "ratelimit-policy": ", ".join([_format_policy(each) for each in limit_statuses]),
        "ratelimit": ", ".join([f'"{each.name}";r={each.remaining};t={ceil(each.reset_s)}' for each in limit_statuses]),
        "ratelimit-limit": limit,
        "ratelimit-remaining": remaining,
        "ratelimit-reset": reset,
        "x-ratelimit-limit": limit,
        "x-ratelimit-remaining": remaining,
        "x-ratelimit-reset": reset,
    }


def make_openai_limit_headers(limit_statuses: Sequence[LimitStatus]) -> dict[str, str]:
    """Return the limits on requests and tokens in the headers of OpenAI's API."""
    found: dict[str, str] = {}
    for each in limit_statuses:
        if each.name in ("requests", "tokens"):
            found[f"x-ratelimit-limit-{each.name}"] = str(each.quota)
            found[f"x-ratelimit-remaining-{each.name}"] = str(each.remaining)
            found[f"x-ratelimit-reset-{each.name}"] = f"{each.reset_s:.3f}s"
    return found


def _format_policy(status: LimitStatus) -> str:
    if not status.window_s:
        return f'"{status.name}";q={status.quota};qu="concurrent-requests"'
    return f'"{status.name}";q={status.quota};w={status.window_s}'
