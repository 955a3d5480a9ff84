"""The engine protocol: load, warm up, infer, close."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.core.generation import Generation, GenerationStep
from penstock.core.requests import Parameter
from penstock.core.signature import Signature
from penstock.core.tensors import Array


@dataclass(frozen=True, slots=True)
class EngineHome:
    """Where engines may keep what they made of a model, over restarts."""

    folder: Path  # the data directory
    max_bytes: int  # of all that is kept of one kind


@dataclass(frozen=True, slots=True)
class ImageWork:
    """What an image task would do around a network of planes, for an engine that can do it on its device."""

    scale: int  # by which images are enlarged before the network
    overlap: int  # pixels that are repeated around them
    is_for_colors: bool = False  # the network is for every plane, and not for the luminance alone


@dataclass(frozen=True, slots=True)
class EngineSpec:
    file: Path
    precision: str  # auto, fp32, bf16, fp16
    threads: int
    instances: int
    device: str = "cpu"  # auto, cpu, cuda, cuda:1, mps
    home: EngineHome | None = None  # None: nothing is kept
    image: ImageWork | None = None  # of an image task


class Engine(Protocol):
    """`infer` is called from one thread per instance at a time, several instances in parallel.

    Instances are numbered from 0; one more, with the number `instances`, is for quick batches on the worker's loop.

    BYTES tensors are object arrays of str or bytes, BF16 arrays have ml_dtypes.bfloat16.
    Failures are EngineFailed, or InvalidTensor where the input is at fault.
    """

    def load(self) -> Signature: ...

    def warm_up(self, inputs: Mapping[str, Array]) -> None: ...

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]: ...

    def close(self) -> None: ...


@runtime_checkable
class RowsEngine(Protocol):
    """An engine that gets ready for the batches that a task of texts may make."""

    def prepare_rows(self, max_rows: int, max_length: int, max_tokens: int | None) -> None:
        """Once, after `load`; blocks for as long as that takes. `max_tokens`: rows × length; None: no such bound."""
        ...


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a model's own code may know of the request beside its tensors."""

    request_id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    session_id: str = ""  # empty: none
    seq_no: int = 0
    is_start: bool = False  # of the session, or of it on this worker
    is_end: bool = False


@runtime_checkable
class ContextEngine(Protocol):
    """An engine that runs a model's own code: it is told of requests and sessions, and may answer many times.

    Such a block is not batched with other requests; `infer` of it stands for a call without context.
    """

    def infer_with(
        self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str], context: CallContext
    ) -> list[Array]: ...

    def stream(
        self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str], context: CallContext
    ) -> Generator[list[Array], None, None]:
        """A decoupled model's answers, each made when it is asked for; `close` of the generator stops the model."""
        ...

    def end_session(self, session_id: str, reason: str) -> None:
        """The session is over: ended, idle, or its worker leaves. Called from an instance's thread."""
        ...

    def probe(self, instance: int) -> str:
        """Empty, or what is wrong. Called from an instance's thread; the model's code gets no request for it."""
        ...


@runtime_checkable
class GeneratingEngine(Protocol):
    """An engine that generates text for many requests at once, which join and leave between its steps.

    A generation has a number, which its caller chooses and which is not used again.
    """

    def start(self, tell: Callable[[GenerationStep], None]) -> None:
        """Once, after `load`: `tell` is called in a thread of the engine's with each step that brought something."""
        ...

    def add(self, number: int, generation: Generation) -> None:
        """Does not wait. It joins when there is room for it; what is wrong with it is told as its failure."""
        ...

    def cancel(self, number: int) -> None:
        """Does not wait. Nothing more is told of it, and what it held is free before the next step."""
        ...

    def probe(self, instance: int) -> str:
        """Empty, or what is wrong."""
        ...
