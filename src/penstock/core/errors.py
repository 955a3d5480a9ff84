"""All errors that Penstock raises on purpose.

PenstockError
├── InvalidRequest          the caller sent something that cannot be served as it is
│   ├── UnknownModel        no such model, version or block
│   ├── OtherCluster        the block belongs to another cluster, which the message names
│   ├── NotFound            no such worker, key or rollout
│   │   └── NoMatch         no block matches the search query
│   ├── InvalidTensor       a tensor's name, datatype, shape or size is wrong
│   ├── InvalidImage        not an image in a supported format, or a decompression bomb
│   ├── HeadersTooLarge     too many headers, or headers that are too long
│   ├── TooSlow             the request stopped arriving before it was complete
│   ├── SessionError        a request out of its session's order, or of a session that has ended
│   ├── Unauthenticated     the caller's key or certificate is missing, unknown, expired or revoked
│   ├── Forbidden           the caller's permissions or the server's settings do not allow the request
│   └── UnknownHost         the Host header names a host that is not this server
├── Refused                 an admission limit: nothing ran, try later or send less
│   ├── RequestTooLarge     message size, rows or tokens: the same request never fits
│   ├── QueueFull           the block has too many requests waiting
│   ├── QueueTimeout        the request waited longer than the queue policy of its priority allows
│   ├── Overloaded          the gateway holds too many requests or bytes
│   └── RateLimited         the caller reached one of its rate or concurrency limits
├── Corrupted               a file's SHA-256 differs from the expected one
├── Conflict                somebody else changed the same record in the meantime
│   ├── NameTaken           another role of the cluster has this name
│   └── PreconditionFailed  the object changed after the caller read it
├── Unavailable             nothing can serve the request now
│   ├── ModelNotReady       the model exists, but is loading, failed or unloaded
│   ├── DeviceOutOfMemory   a GPU has no memory for the model or for its computation
│   ├── Draining            this process is shutting down
│   ├── SessionMoved        another gateway owns the session now: nothing ran
│   ├── GatewayLost         the gateway that owned the session died; the request may have run
│   ├── WorkerLost          the workers that ran the request died, and it must not run again
│   ├── NotLeader           another manager leads the cluster, or no manager leads now
│   ├── StoreUnavailable    the metadata store does not answer; a write may have happened
│   ├── LeaseLost           the lease ended, and the records written with it were deleted
│   └── Compacted           the metadata store no longer keeps the requested changes
├── DeadlineExceeded        the deadline passed; the request may have run
├── Cancelled               the caller closed the request
├── EngineFailed            the model itself failed on this input
├── PolicyFailed            a registered search policy failed; the request was not run
├── WireError               a peer sent a message that cannot be decoded
├── ConfigError             a setting or a model.yaml is wrong; fields name file and line
└── InternalError           a bug in Penstock

`is_retryable`: the same request may succeed later. `is_definite`: the request certainly did not run to completion.
Only endpoints/statuses.py knows transport codes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.core.principals import LimitStatus


class PenstockError(Exception):
    code = "internal"
    is_retryable = False
    is_definite = True

    def __init__(self, message: str, **fields: str) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, str] = fields

    @property
    def reason(self) -> str:
        """Return the error's subcode for programs, or an empty text; the message is for people only."""
        return self.fields.get("reason", "")


class InvalidRequest(PenstockError):
    code = "invalid_request"


class UnknownModel(InvalidRequest):
    code = "unknown_model"


class OtherCluster(InvalidRequest):
    code = "other_cluster"


class NotFound(InvalidRequest):
    code = "not_found"


class NoMatch(NotFound):
    code = "no_match"


class InvalidTensor(InvalidRequest):
    code = "invalid_tensor"


class InvalidImage(InvalidRequest):
    code = "invalid_image"


class HeadersTooLarge(InvalidRequest):
    code = "headers_too_large"


class TooSlow(InvalidRequest):
    code = "too_slow"


class SessionError(InvalidRequest):
    code = "session_error"


class Unauthenticated(InvalidRequest):
    code = "unauthenticated"


class Forbidden(InvalidRequest):
    code = "forbidden"


class UnknownHost(InvalidRequest):
    code = "unknown_host"


class Refused(PenstockError):
    code = "refused"
    is_retryable = True
    retry_after_s = 1.0


class RequestTooLarge(Refused):
    code = "request_too_large"
    is_retryable = False


class QueueFull(Refused):
    code = "queue_full"


class QueueTimeout(Refused):
    code = "queue_timeout"


class Overloaded(Refused):
    code = "overloaded"


class RateLimited(Refused):
    """Raised when a caller reaches one of its limits, which the field `limit` names."""

    code = "rate_limited"
    limit_statuses: "tuple[LimitStatus, ...]" = ()  # the state of each of the caller's limits

    def __init__(self, message: str, **fields: str) -> None:
        super().__init__(message, **fields)
        self.retry_after_s = float(fields.get("retry_after_s", Refused.retry_after_s))


class Corrupted(PenstockError):
    code = "corrupted"


class Conflict(PenstockError):
    code = "conflict"


class NameTaken(Conflict):
    code = "name_taken"

    @classmethod
    def for_role(cls, role_id: str) -> "NameTaken":
        return cls(
            f"another role of the cluster is already named '{role_id}': give each host a different --node, and each "
            "role on the same host a different --id"
        )


class PreconditionFailed(Conflict):
    code = "precondition_failed"


class Unavailable(PenstockError):
    code = "unavailable"
    is_retryable = True
    retry_after_s = 1.0


class ModelNotReady(Unavailable):
    code = "model_not_ready"


class DeviceOutOfMemory(Unavailable):
    """Raised if a GPU has too little memory. `device`, `needed_bytes` and `free_bytes` are fields, if known."""

    code = "device_out_of_memory"


class Draining(Unavailable):
    code = "draining"


class SessionMoved(Unavailable):
    code = "session_moved"


class GatewayLost(Unavailable):
    code = "gateway_lost"
    is_definite = False


class WorkerLost(Unavailable):
    code = "worker_lost"
    is_definite = False


class NotLeader(Unavailable):
    """Raised by a manager that is not the leader. The field `leader` is the leader's address, if known."""

    code = "not_leader"
    retry_after_s = 0.2


class StoreUnavailable(Unavailable):
    code = "store_unavailable"
    is_definite = False


class LeaseLost(Unavailable):
    code = "lease_lost"


class Compacted(Unavailable):
    code = "compacted"


class DeadlineExceeded(PenstockError):
    code = "deadline_exceeded"
    is_definite = False


class Cancelled(PenstockError):
    code = "cancelled"
    is_definite = False


class EngineFailed(PenstockError):
    code = "engine_failed"


class PolicyFailed(PenstockError):
    code = "policy_failed"


class WireError(PenstockError):
    code = "wire_error"


class ConfigError(PenstockError):
    code = "config_error"


BUG_MESSAGE = "the server failed; its log says more"  # the message to a caller whose request hit a bug in Penstock


class InternalError(PenstockError):
    code = "internal"
    is_definite = False


# A step of an ordered session that fails with one of these errors is finished, because it would fail again. After any
# other failure the step stays open and may run again.
CONCLUSIVE_ERRORS = (InvalidRequest, RequestTooLarge, EngineFailed)


def _list_errors(root: type[PenstockError]) -> list[type[PenstockError]]:
    return [root, *(error for child in root.__subclasses__() for error in _list_errors(child))]


# InternalError replaces the root, which comes first and has the same code.
ERRORS_BY_CODE: Mapping[str, type[PenstockError]] = {error.code: error for error in _list_errors(PenstockError)}


def rebuild_error(code: str, message: str, fields: Mapping[str, str]) -> PenstockError:
    """Rebuild an error that arrived as a code. An unknown code, from a newer peer, becomes an InternalError."""
    return ERRORS_BY_CODE.get(code, InternalError)(message, **fields)


def get_message(error: Exception) -> str:
    return error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def remove_trace(error: PenstockError) -> PenstockError:
    """Remove tracebacks and causes, whose reference cycles would keep the request in memory."""
    following: BaseException | None = error
    while following is not None:
        each, following = following, following.__cause__ or following.__context__
        each.__traceback__ = each.__cause__ = each.__context__ = None
    return error
