"""The task protocol: prepare a request into pieces, join pieces into a batch, split it, finish the request."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.core.requests import Parameter
from penstock.core.tensors import Array, Tensor, TensorSpec


@dataclass(slots=True)
class TaskRequest:
    inputs: list[Tensor]  # emptied when nobody waits for the answer any more
    outputs: list[str]  # those asked for; empty: all
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(slots=True)
class Piece:
    """What the batcher may join with other pieces: texts of like length, one tile, or all rows of a tensor request."""

    arrays: dict[str, Array]
    rows: int = 1
    length: int = 1  # tokens in a row; padding evens it out within a batch
    key: Hashable = None  # only pieces of one key are ever joined
    padding: int = 0  # of its tokens, those that even out its own rows


@dataclass(slots=True)
class Prepared:
    pieces: list[Piece]
    context: Any = None  # the task's own, handed to `finish`
    parameters: dict[str, Parameter] = field(default_factory=dict)  # told to the caller with the answer
    order: Array | None = None  # of all pieces' rows, the one for each row of the answer; None: as they are

    def arrange(self, results: Sequence[Sequence[Array]]) -> Array:
        """The rows of the results' first arrays, one for each row of the answer."""
        rows: Array = results[0][0] if len(results) == 1 else np.concatenate([result[0] for result in results])
        return rows if self.order is None else rows[self.order]


@dataclass(frozen=True, slots=True)
class TaskSignature:
    """What clients see: inputs and outputs of the block, batch dimension included."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int


class TaskInput(Protocol):
    """From requests to the network's inputs."""

    is_prepare_cheap: bool
    signature: TaskSignature

    def prepare(self, request: TaskRequest) -> Prepared: ...

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]: ...

    def warm_up_inputs(self) -> list[dict[str, Array]]: ...


@runtime_checkable
class Weighing(Protocol):
    """A task, or its input, that can take much memory for little that is sent."""

    def weigh(self, request: TaskRequest) -> int:
        """How many bytes it takes at most, from `prepare` to its answer. Quick, and never raises."""
        ...


@runtime_checkable
class Brisk(Protocol):
    """A task, or its input, that prepares what has few bytes sooner than a thread would be told of it."""

    brisk_bytes: int


class Task(TaskInput, Protocol):
    """`prepare` and `finish` run on the event loop where the task says they are cheap and there is little to do, else
    in threads.

    Faults of the caller are InvalidRequest or RequestTooLarge; they fail that request alone.
    """

    is_finish_cheap: bool
    engine_outputs: Sequence[str]  # the network's outputs that `split` wants

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        """One sequence of arrays per piece, in the order of `engine_outputs`."""
        ...

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        """`results` has what `split` gave for each of the request's pieces, in their order."""
        ...
