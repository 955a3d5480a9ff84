"""What went wrong in a call, as one of Penstock's errors."""

from collections.abc import Iterable, Mapping

import grpc

from penstock.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PenstockError,
    RequestTooLarge,
    Unavailable,
    from_code,
)
from penstock.pb.inference import grpc_service_pb2 as pb

CODE = "penstock-code"
RETRY_AFTER = "retry-after"
# What gRPC itself answers, or another server: it carries no code of ours.
_FOREIGN: Mapping[grpc.StatusCode, type[PenstockError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RequestTooLarge,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
}


def from_call(error: grpc.RpcError, address: str) -> PenstockError:
    """`error` is a grpc.Call too, in both flavours of gRPC."""
    status, details = error.code(), error.details() or ""
    trailing = _texts(error.trailing_metadata() or ())
    if CODE in trailing:
        found = from_code(trailing[CODE], details, {})
        if RETRY_AFTER in trailing and hasattr(found, "retry_after_s"):
            found.retry_after_s = float(trailing[RETRY_AFTER])
        return found
    if status is grpc.StatusCode.UNAVAILABLE:
        return unreachable(address, details)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return late()
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequest(f"the server at {address} does not speak the Open Inference Protocol: {details}")
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
    code = answer.infer_response.parameters[CODE].string_param
    return from_code(code, answer.error_message, {})


def unreachable(address: str, details: str) -> Unavailable:
    error = Unavailable(f"no answer ({_reason(details)}): is `penstock serve` running at {address}?")
    # Only a connection that never came about tells that nothing ran.
    error.is_definite = "failed to connect" in details.lower()
    return error


def late() -> DeadlineExceeded:
    return DeadlineExceeded("no answer before the deadline; give a longer timeout if the model needs it")


def _reason(details: str) -> str:
    """gRPC tells a long story, whose end is what the system said."""
    return details.strip().rpartition(": ")[2] or "connection lost"


def _texts(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {key: value for key, value in metadata if isinstance(value, str)}
