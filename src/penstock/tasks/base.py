"""The protocols of tasks: prepare requests as pieces, join pieces into batches, split results, finish answers."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.core.requests import Parameter
from penstock.core.tensors import Array, Tensor, TensorSpec


@dataclass(slots=True)
class TaskRequest:
    inputs: list[Tensor]  # emptied when the request is cancelled
    outputs: list[str]  # names of the requested outputs; empty: all
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(slots=True)
class Piece:
    """A part of a request that can be joined with pieces of other requests into a batch.

    For example texts of similar length, one tile of an image, or all rows of tensors.
    """

    arrays: dict[str, Array]
    rows: int = 1
    length: int = 1  # tokens per row; a batch is padded to its longest piece
    key: Hashable = None  # only pieces with equal keys are joined
    padding: int = 0  # padding tokens within the piece


@dataclass(slots=True)
class Prepared:
    pieces: list[Piece]
    context: Any = None  # the task's data about the request, for `finish`
    parameters: dict[str, Parameter] = field(default_factory=dict)  # returned to the caller with the answer
    order: Array | None = None  # for each row of the answer: the index of the row in the pieces; None: in order

    def arrange(self, results: Sequence[Sequence[Array]]) -> Array:
        """Return the rows of the pieces' results (of their first arrays), in the order of the answer's rows."""
        rows: Array = results[0][0] if len(results) == 1 else np.concatenate([result[0] for result in results])
        return rows if self.order is None else rows[self.order]


@dataclass(frozen=True, slots=True)
class TaskSignature:
    """The inputs and outputs of a block as clients see them, including the batch dimension."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int


class TaskInput(Protocol):
    """Converts requests to the network's inputs."""

    is_prepare_cheap: bool
    signature: TaskSignature

    def prepare(self, request: TaskRequest) -> Prepared: ...

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]: ...

    def warm_up_inputs(self) -> list[dict[str, Array]]: ...


@runtime_checkable
class EstimatesMemory(Protocol):
    """A task (or task input) whose requests may need much more memory than their tensors have."""

    def weigh(self, request: TaskRequest) -> int:
        """Return quickly, without raising, an upper bound of the memory that the request needs until it is answered."""
        ...


@runtime_checkable
class PreparesInline(Protocol):
    """A task (or task input) that prepares requests of up to `inline_bytes` faster than a thread could start."""

    inline_bytes: int


class AnyTask(Protocol):
    """The methods that all tasks have.

    `prepare` and `finish` run on the event loop for small requests if the task declares them cheap, else in threads.
    Both methods raise InvalidRequest or RequestTooLarge if the request is at fault; other requests are not affected.
    """

    is_prepare_cheap: bool
    is_finish_cheap: bool
    signature: TaskSignature

    def prepare(self, request: TaskRequest) -> Prepared: ...

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        """Return the request's answer.

        `results` has the arrays that `split` returned for each of the request's pieces, in the order of the pieces.
        """
        ...


class Task(AnyTask, TaskInput, Protocol):
    """A task whose requests become pieces that are joined into batches."""

    engine_outputs: Sequence[str]  # the network's outputs that are passed to `split`

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        """Return the arrays of each piece, in the order of `engine_outputs`."""
        ...
