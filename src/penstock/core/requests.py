"""One internal request and response, whatever protocol they came in by."""

from dataclasses import dataclass, field

from penstock.core.tensors import Tensor

Parameter = bool | int | float | str


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
    size_bytes: int = 0


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
