"""Converts failures of gRPC calls to Penstock's errors."""

from collections.abc import Iterable, Mapping

import grpc

from penstock.core.errors import (
    Cancelled,
    DeadlineExceeded,
    Forbidden,
    InternalError,
    InvalidRequest,
    PenstockError,
    Refused,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    rebuild_error,
)
from penstock.pb.inference import grpc_service_pb2 as pb

CODE = "penstock-code"
RETRY_AFTER, RETRY_AFTER_MS = "retry-after", "retry-after-ms"
LIMIT = "penstock-limit"
PLAIN_MARKS = (
    "socket closed",
    "reset by peer",
    "connection lost",
)  # a TLS port closed a plaintext connection
TLS_MARKS = ("ssl", "certificate", "handshake")  # words in gRPC's error text if TLS has failed
# For errors of gRPC itself or of another server, which carry no Penstock code.
_FOREIGN: Mapping[grpc.StatusCode, type[PenstockError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Refused,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
}


def convert_call_error(error: grpc.RpcError, address: str) -> PenstockError:
    """Convert the error of a call to the server at `address`, which grpc or grpc.aio raised."""
    status, details = error.code(), error.details() or ""
    trailing = _decode_values(error.trailing_metadata() or ())
    if CODE in trailing:
        found = rebuild_error(trailing[CODE], details, {"limit": trailing[LIMIT]} if trailing.get(LIMIT) else {})
        return _set_retry_hint(found, _read_retry_hint(trailing))
    if status is grpc.StatusCode.UNAVAILABLE:
        return make_unreachable_error(address, details)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return make_timeout_error()
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequest(f"the server at {address} does not speak the Open Inference Protocol: {details}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
        return RequestTooLarge(details)
    return _FOREIGN.get(status, InternalError)(details or f"the call failed with {status.name}")


def convert_manager_error(error: grpc.RpcError, address: str) -> PenstockError:
    """Convert the error of a call to a manager, with advice for managers."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequest(f"the server at {address} is not a Penstock manager: give a manager's address")
    found = convert_call_error(error, address)
    if type(found) is not Unavailable:
        return found
    problem = f"no Penstock manager answers at {address} ({_find_reason(error.details() or '')}): is it running there?"
    return Unavailable(f"{problem} Give --server HOST:PORT of a manager")


def convert_stream_error(answer: pb.ModelStreamInferResponse) -> PenstockError:
    given = answer.infer_response.parameters
    fields = {"limit": given["limit"].string_param} if "limit" in given else {}
    found = rebuild_error(given[CODE].string_param, answer.error_message, fields)
    return _set_retry_hint(found, given["retry_after_s"].double_param if "retry_after_s" in given else None)


def make_unreachable_error(address: str, details: str) -> Unavailable:
    advice = f"is `penstock serve` running at {address}?"
    if any(mark in details.lower() for mark in TLS_MARKS):
        advice = f"does the server at {address} use TLS, with a certificate from an authority that this client trusts?"
    elif any(mark in details.lower() for mark in PLAIN_MARKS):
        advice += " If that port uses TLS, write grpcs:// or https:// before the address, and give the authority (ca)"
    error = Unavailable(f"no answer ({_find_reason(details)}): {advice}")
    error.retry_after_s = 0.0  # the server gave no hint
    # It is certain that nothing ran only if no connection was established.
    error.is_definite = "failed to connect" in details.lower()
    return error


def mark_unsent(error: PenstockError) -> PenstockError:
    """Return the error marked as definite: the request was not sent, so it certainly did not run."""
    if not isinstance(error, Unavailable) or error.is_definite:
        return error
    found = Unavailable(error.message)
    found.retry_after_s = error.retry_after_s
    return found


def make_unresponsive_error(address: str) -> Unavailable:
    """Return the error of a request to a worker that stopped answering; the request may have run."""
    error = Unavailable(f"the worker at {address} does not answer")
    error.is_definite, error.retry_after_s = False, 0.0
    return error


def make_timeout_error() -> DeadlineExceeded:
    return DeadlineExceeded("no answer before the deadline; give a longer timeout if the model needs it")


def _find_reason(details: str) -> str:
    """Return the last part of gRPC's error text, which is the operating system's message."""
    return details.strip().rpartition(": ")[2] or "connection lost"


def _read_retry_hint(trailing: Mapping[str, str]) -> float | None:
    """Return after how many seconds the server suggests a retry; prefer the hint in milliseconds."""
    for name, unit_s in ((RETRY_AFTER_MS, 0.001), (RETRY_AFTER, 1.0)):
        try:
            return max(0.0, float(trailing[name]) * unit_s)
        except (KeyError, ValueError):
            pass
    return None


def _set_retry_hint(error: PenstockError, retry_after_s: float | None) -> PenstockError:
    if retry_after_s is not None and hasattr(error, "retry_after_s"):
        error.retry_after_s = retry_after_s
    return error


def _decode_values(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {key: value for key, value in metadata if isinstance(value, str)}
