"""One internal request and response, whatever protocol they came in by."""

from dataclasses import dataclass, field
from typing import Literal

from penstock.core.principals import ANYBODY, LimitStanding, Principal
from penstock.core.tensors import Tensor

Parameter = bool | int | float | str
CacheMode = Literal["use", "bypass", "refresh"]


@dataclass(slots=True)
class SessionStep:
    """A request's place in its session."""

    session_id: str
    seq_no: int | None = None  # from 1; None: as they come
    is_start: bool = False
    is_end: bool = False
    home: bytes = b""  # the worker that has run the session, as the router has it; empty: none yet
    is_ordered: bool = True  # False: its requests belong to one worker, and that is all
    life: int = 0  # of an ordered session, for workers to tell one from the next of the same id
    is_again: bool = False  # it may have run, and must not run twice: only what became of it is wanted


@dataclass(frozen=True, slots=True)
class Controls:
    """What a request's parameters ask of the server rather than of the model."""

    priority: int = 1  # 1 is the highest
    queue_timeout_s: float | None = None
    session: SessionStep | None = None
    shard_key: str = ""
    cache: CacheMode = "use"


PLAIN = Controls()  # of a request that asks nothing


@dataclass(slots=True)
class InferRequest:
    model: str
    inputs: list[Tensor]
    version: str = ""  # empty: the newest ready one
    request_id: str = ""
    outputs: list[str] = field(default_factory=list)  # empty: all
    parameters: dict[str, Parameter] = field(default_factory=dict)
    timeout_s: float | None = None  # what the caller has left; None: the model's own
    traceparent: str = ""
    protocol: str = "grpc"
    client: str = ""  # the address that it came from
    size_bytes: int = 0
    controls: Controls = PLAIN
    principal: Principal = ANYBODY  # who asks
    standings: tuple[LimitStanding, ...] = ()  # how its caller stands with its limits; empty: it has none


@dataclass(slots=True)
class Timing:
    """Where a job's time went on the worker, in nanoseconds."""

    queue_ns: int = 0
    batch_ns: int = 0
    compute_ns: int = 0
    finish_ns: int = 0
    batch_rows: int = 0


@dataclass(slots=True)
class InferResponse:
    model: str
    version: str
    request_id: str
    outputs: list[Tensor]
    timing: Timing
    parameters: dict[str, Parameter] = field(default_factory=dict)
    is_final: bool = True  # False: a decoupled model has more to say to this request
