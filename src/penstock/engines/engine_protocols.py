"""The protocols of engines: an engine loads a model, runs batches, calls or generations, and closes the model."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.core.generation import Generation, GenerationStep
from penstock.core.requests import Parameter
from penstock.core.signature import ImageWork, Signature
from penstock.core.tensors import Array


@dataclass(frozen=True, slots=True)
class EngineHome:
    """The folder in which engines keep files built from models, so that later starts are faster."""

    folder: Path  # the data directory
    max_bytes: int  # limit for all kept files of one engine


@dataclass(frozen=True, slots=True)
class EngineSpec:
    file: Path
    precision: str  # auto, fp32, bf16, fp16
    threads: int
    instances: int
    device: str = "cpu"  # auto, cpu, cuda, cuda:1, mps
    home: EngineHome | None = None  # None: files are not kept
    image: ImageWork | None = None  # set for an image task


class AnyEngine(Protocol):
    """The methods that all engines have. A failure raises EngineFailed, or InvalidTensor if the input is the cause."""

    def load(self) -> Signature: ...

    def close(self) -> None: ...


class Engine(AnyEngine, Protocol):
    """An engine that runs batches.

    Each instance's `infer` is called from one thread at a time; several instances run in parallel.

    Instances are numbered from 0. With the number after the last instance, `infer` runs a small batch in the thread of
    the worker's event loop.

    BYTES tensors are object arrays of str or bytes, BF16 arrays have ml_dtypes.bfloat16.
    """

    def warm_up(self, inputs: Mapping[str, Array]) -> None: ...

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]: ...


@runtime_checkable
class RowsEngine(Protocol):
    """An engine that can prepare for a text task's batches, for example by capturing CUDA graphs."""

    def prepare_rows(self, max_rows: int, max_length: int, max_tokens: int | None) -> None:
        """Prepare for batches up to these sizes.

        Called once after `load`; may block for a long time. `max_tokens` bounds rows x length; None means no bound.
        """
        ...


@dataclass(frozen=True, slots=True)
class CallContext:
    """The data of a request, besides its tensors, that a model's own code receives."""

    request_id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    session_id: str = ""  # empty: no session
    seq_no: int = 0
    is_start: bool = False  # first request of the session, or its first one on this worker
    is_end: bool = False


class ContextEngine(Engine, Protocol):
    """An engine that passes requests and sessions to a model's own code, which may send several answers per request.

    Requests to this engine are not joined into batches. `infer` is like `infer_with`, but without a context.
    """

    def infer_with(
        self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str], context: CallContext
    ) -> list[Array]: ...

    def stream(
        self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str], context: CallContext
    ) -> Generator[list[Array], None, None]:
        """Yield a decoupled model's answers, each computed on demand; closing the generator stops the model."""
        ...

    def end_session(self, session_id: str, reason: str) -> None:
        """End a session that is over or idle, or whose worker shuts down. Called from an instance's thread."""
        ...

    def probe(self, instance: int) -> str:
        """Return why the model does not work, or an empty text if it works, without running the model's code.

        Called from an instance's thread.
        """
        ...


class GeneratingEngine(AnyEngine, Protocol):
    """An engine that generates text for many requests at once; requests join and leave between its steps.

    The caller identifies each generation by a unique number.
    """

    def start(self, report: Callable[[GenerationStep], None]) -> None:
        """Accept generations, and call `report` from an engine thread after each step that made progress.

        The caller calls this method once, after `load`.
        """
        ...

    def add(self, number: int, generation: Generation) -> None:
        """Queue a generation without waiting; it starts when the KV cache has room. Failures go to `report`."""
        ...

    def cancel(self, number: int) -> None:
        """Stop a generation without waiting; its progress is no longer reported, and its KV cache is freed."""
        ...

    def probe(self) -> str:
        """Return why the engine does not work, or an empty text if it works. This call may block for a moment."""
        ...
