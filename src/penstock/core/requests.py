"""The internal request and response that every protocol is translated to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from penstock.core.principals import ANYBODY, LimitStatus, Principal
from penstock.core.tensors import Tensor

if TYPE_CHECKING:
    from penstock.core.blocks import BlockDescription

Parameter = bool | int | float | str
CacheMode = Literal["use", "bypass", "refresh"]


@dataclass(slots=True)
class SessionStep:
    """A request's position in its session."""

    session_id: str
    seq_no: int | None = None  # from 1; None: in order of arrival
    is_start: bool = False
    is_end: bool = False
    home: bytes = b""  # the router's name of the worker that runs the session; empty: no worker has run it yet
    is_ordered: bool = True  # False: affinity only
    life: int = 0  # distinguishes ordered sessions that use the same id one after the other
    is_again: bool = False  # the step may have run already: return its recorded outcome and do not run it


@dataclass(frozen=True, slots=True)
class Controls:
    """The parameters of a request that address the server instead of the model."""

    priority: int = 1  # 1 is the highest
    queue_timeout_s: float | None = None
    session: SessionStep | None = None
    shard_key: str = ""
    cache: CacheMode = "use"


NO_CONTROLS = Controls()  # of a request without such parameters


class AnswerSink(Protocol):
    """Receives the answers to a streamed request, except the last answer."""

    @property
    def has_begun(self) -> bool:
        """True after the first call of `put`."""

    def begin(self, ahead: int, allow: Callable[[int], None]) -> None:
        """Let up to `ahead` answers wait in this sink, and call `allow(n)` whenever the caller has taken n answers."""

    def put(self, answer: "InferResponse") -> bool:
        """Add an answer. Return False and drop the answer if too many are waiting for the caller."""


@dataclass(slots=True)
class PacketFields:
    """The fields of a block protocol's packet, except its inputs."""

    session_id: str
    seq_no: int = 0
    ts: float = 0.0  # by the client's clock, in seconds since 1970
    data: bytes = b""
    query_parameters: str = ""  # a search query in JSON; empty: the packet names its block
    output_ptr: str = ""  # a graph in JSON
    frame_ptr: bytes = b""  # names a stored object, in JSON


class InputBinder(Protocol):
    """Makes the inputs of a request, if they depend on the block that runs the request."""

    def bind(self, request: "InferRequest", block: "BlockDescription") -> None:
        """Set `inputs` and `parameters` of the request; raise InvalidRequest if the block cannot run the request."""


@dataclass(slots=True)
class InferRequest:
    model: str  # a model's name or a block id; empty: `packet.query_parameters` selects the block
    inputs: list[Tensor]
    version: str = ""  # empty: the newest ready one
    request_id: str = ""
    outputs: list[str] = field(default_factory=list)  # empty: all
    parameters: dict[str, Parameter] = field(default_factory=dict)
    timeout_s: float | None = None  # until the caller's deadline; None: the model's timeout
    traceparent: str = ""
    protocol: str = "grpc"
    client: str = ""  # the client's address
    size_bytes: int = 0
    controls: Controls = NO_CONTROLS
    principal: Principal = ANYBODY  # the caller
    limit_statuses: tuple[LimitStatus, ...] = ()  # of the caller; empty: the caller has no limits
    answers: AnswerSink | None = None  # None: the caller wants one complete answer
    packet: PacketFields | None = None  # None: the request did not come as a packet
    binder: InputBinder | None = None  # makes the inputs when the block is known; None: `inputs` is complete

    @property
    def has_query(self) -> bool:
        """True while a search query must still select the block."""
        return not self.model and self.packet is not None and bool(self.packet.query_parameters)


@dataclass(slots=True)
class Timing:
    """The phases of a job on the worker, in nanoseconds."""

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
    is_final: bool = True  # False: a decoupled model will send more answers to this request
