"""What went wrong in a call, as one of Penstock's errors."""

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
    from_code,
)
from penstock.pb.inference import grpc_service_pb2 as pb

CODE = "penstock-code"
RETRY_AFTER, RETRY_AFTER_MS = "retry-after", "retry-after-ms"
LIMIT = "penstock-limit"
TLS_MARKS = ("ssl", "certificate", "handshake")  # of what gRPC says where TLS is what failed
# What gRPC itself answers, or another server: it carries no code of ours.
_FOREIGN: Mapping[grpc.StatusCode, type[PenstockError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Refused,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
}


def from_call(error: grpc.RpcError, address: str) -> PenstockError:
    """`error` is a grpc.Call too, in both flavours of gRPC."""
    status, details = error.code(), error.details() or ""
    trailing = _texts(error.trailing_metadata() or ())
    if CODE in trailing:
        found = from_code(trailing[CODE], details, {"limit": trailing[LIMIT]} if trailing.get(LIMIT) else {})
        return _with_hint(found, _seconds(trailing))
    if status is grpc.StatusCode.UNAVAILABLE:
        return unreachable(address, details)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return late()
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequest(f"the server at {address} does not speak the Open Inference Protocol: {details}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
        return RequestTooLarge(details)
    return _FOREIGN.get(status, InternalError)(details or f"the call failed with {status.name}")


def from_manager(error: grpc.RpcError, address: str) -> PenstockError:
    """The same, where a manager was called."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequest(f"what answers at {address} is no manager of Penstock: give its address with --manager")
    found = from_call(error, address)
    if type(found) is not Unavailable:
        return found
    said = f"no manager of Penstock answers at {address} ({_reason(error.details() or '')}): is it running there?"
    return Unavailable(f"{said} Give --manager HOST:PORT (setting cluster.join)")


def from_stream(answer: pb.ModelStreamInferResponse) -> PenstockError:
    told = answer.infer_response.parameters
    found = from_code(
        told[CODE].string_param, answer.error_message, {"limit": told["limit"].string_param} if "limit" in told else {}
    )
    return _with_hint(found, told["retry_after_s"].double_param if "retry_after_s" in told else None)


def unreachable(address: str, details: str) -> Unavailable:
    advice = f"is `penstock serve` running at {address}?"
    if any(mark in details.lower() for mark in TLS_MARKS):
        advice = f"does the server at {address} speak TLS, with a certificate of an authority that is trusted here?"
    error = Unavailable(f"no answer ({_reason(details)}): {advice}")
    error.retry_after_s = 0.0  # nobody said when
    # Only a connection that never came about tells that nothing ran.
    error.is_definite = "failed to connect" in details.lower()
    return error


def unsent(error: PenstockError) -> PenstockError:
    """The same of what never left: it did not run."""
    if not isinstance(error, Unavailable) or error.is_definite:
        return error
    found = Unavailable(error.message)
    found.retry_after_s = error.retry_after_s
    return found


def silent(address: str) -> Unavailable:
    """Whether it ran is not known."""
    error = Unavailable(f"the worker at {address} does not answer")
    error.is_definite, error.retry_after_s = False, 0.0
    return error


def late() -> DeadlineExceeded:
    return DeadlineExceeded("no answer before the deadline; give a longer timeout if the model needs it")


def _reason(details: str) -> str:
    """gRPC tells a long story, whose end is what the system said."""
    return details.strip().rpartition(": ")[2] or "connection lost"


def _seconds(trailing: Mapping[str, str]) -> float | None:
    """What the server says of when to come back; milliseconds are finer."""
    for name, unit_s in ((RETRY_AFTER_MS, 0.001), (RETRY_AFTER, 1.0)):
        try:
            return max(0.0, float(trailing[name]) * unit_s)
        except (KeyError, ValueError):
            pass
    return None


def _with_hint(error: PenstockError, retry_after_s: float | None) -> PenstockError:
    if retry_after_s is not None and hasattr(error, "retry_after_s"):
        error.retry_after_s = retry_after_s
    return error


def _texts(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {key: value for key, value in metadata if isinstance(value, str)}
