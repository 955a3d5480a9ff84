"""Every error that Penstock raises on purpose.

PenstockError
├── InvalidRequest          the caller sent something that cannot be served as it is
│   ├── UnknownModel        no such model, version or block
│   ├── NotFound            no such worker, key or rollout
│   ├── InvalidTensor       a tensor's name, datatype, shape or size is wrong
│   ├── InvalidImage        bytes that are not an image we read, or a bomb
│   ├── HeadersTooLarge     too many headers, or too long ones
│   ├── TooSlow             it stopped coming before it was whole
│   ├── SessionError        out of its session's order, or its session has ended
│   ├── Unauthenticated     who asks is not known: no key, or one that is not known, has expired or was revoked
│   ├── Forbidden           not to this caller, or not on this server: a setting says who and what
│   └── UnknownHost         it is for a host that this server does not answer to
├── Refused                 an admission limit: nothing ran, try later or send less
│   ├── RequestTooLarge     message size, rows or tokens: the same request never fits
│   ├── QueueFull           the block has too many requests waiting
│   ├── QueueTimeout        it waited longer than its level's queue policy allows
│   ├── Overloaded          the gateway holds too many bytes
│   └── RateLimited         the key has asked for as much as it may for now
├── Corrupted               a file's SHA-256 is not what it should be
├── Conflict                somebody else changed it in the meantime
│   ├── NameTaken           another role of the cluster has this name
│   └── PreconditionFailed  it is not any more what the caller has read
├── Unavailable             nobody can run it now
│   ├── ModelNotReady       known, but loading, failed or unloaded
│   ├── DeviceOutOfMemory   a GPU has no room for the model, or for what it computes
│   ├── Draining            this process is leaving
│   ├── SessionMoved        its session has another gateway now: nothing ran
│   ├── GatewayLost         the gateway that had its session is gone, and whether it ran is not known
│   ├── WorkerLost          the workers that ran it died, and it may not be tried again
│   ├── NotLeader           another manager leads the cluster, or none just now
│   ├── StoreUnavailable    the metadata store does not answer; whether it wrote is not known
│   ├── LeaseLost           the lease has ended, and what was written under it
│   └── Compacted           the metadata store no longer knows changes that far back
├── DeadlineExceeded        the deadline passed; whether it ran is not known
├── Cancelled               the caller left
├── EngineFailed            the model itself failed on this input
├── WireError               a peer sent a frame that cannot be understood
├── ConfigError             a setting or a model.yaml is wrong; carries file and line
└── InternalError           a bug of ours

`is_retryable`: the same request may succeed later. `is_definite`: it certainly did not run
to completion. Transport codes live in gateway/statuses.py alone.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.core.principals import LimitStanding


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
        """Which fault of its code it is, where somebody acts on it; the message is for people alone."""
        return self.fields.get("reason", "")


class InvalidRequest(PenstockError):
    code = "invalid_request"


class UnknownModel(InvalidRequest):
    code = "unknown_model"


class NotFound(InvalidRequest):
    code = "not_found"


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
    """Its field `limit` names the one of the key's limits that it met."""

    code = "rate_limited"
    standings: "tuple[LimitStanding, ...]" = ()  # how the caller stands with each of its limits

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
    def of(cls, role_id: str) -> "NameTaken":
        return cls(
            f"'{role_id}' is the name of another that is there: give each host a name of its own with --node, and each "
            "of several on one host with --id"
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
    """Its fields `device`, `needed_bytes` and `free_bytes` say where and how much, as far as that is known."""

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
    """Its field `leader` is the address of the manager that leads, where one is known."""

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


class WireError(PenstockError):
    code = "wire_error"


class ConfigError(PenstockError):
    code = "config_error"


BUG = "the server failed; its log says more"  # to a caller whose request met a bug of ours


class InternalError(PenstockError):
    code = "internal"
    is_definite = False


# Sent again, a step of an ordered session that failed so would fail again: it is done. After any other failure it is
# open, and may run again.
CONCLUSIVE = (InvalidRequest, RequestTooLarge, EngineFailed)


def _all_errors(root: type[PenstockError]) -> list[type[PenstockError]]:
    return [root, *(error for child in root.__subclasses__() for error in _all_errors(child))]


# The root comes first, and InternalError, which has the same code, takes its place.
BY_CODE: Mapping[str, type[PenstockError]] = {error.code: error for error in _all_errors(PenstockError)}


def from_code(code: str, message: str, fields: Mapping[str, str]) -> PenstockError:
    """The error that travelled as a code; an unknown code comes from a newer peer."""
    return BY_CODE.get(code, InternalError)(message, **fields)


def message_of(error: Exception) -> str:
    return error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def without_trace(error: PenstockError) -> PenstockError:
    """Without what it came from: a circle of frames and errors would keep a request until the collector comes by."""
    following: BaseException | None = error
    while following is not None:
        each, following = following, following.__cause__ or following.__context__
        each.__traceback__ = each.__cause__ = each.__context__ = None
    return error
