"""What an instance does with a batch, and what becomes of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import EngineFailed, PenstockError
from penstock.core.tensors import Array
from penstock.worker.running.batcher import Batch


@dataclass(slots=True)
class BatchOutcome:
    """What became of a batch, and where its time went."""

    instance: int
    batch: Batch
    results: list[Sequence[Array] | PenstockError]
    started: float = 0.0  # of the monotonic clock
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    ended: str = ""  # the session that it ended; empty: none


class Execution(Protocol):
    """Called in an instance's thread."""

    def run(self, instance: int, batch: Batch) -> BatchOutcome:
        """Never raises: what goes wrong is the result of the pieces that it went wrong for."""
        ...

    def probe(self, instance: int) -> str:
        """Whether the model still works. Empty, or what is wrong."""
        ...


def as_engine_failure(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    return EngineFailed(f"the model failed on this input: {type(error).__name__}: {error}")
