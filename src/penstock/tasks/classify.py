"""The classify task: images, texts or tensors in, labels and their scores out, best first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.core.errors import ConfigError, EngineFailed, InvalidRequest
from penstock.core.signature import Signature
from penstock.core.tensors import BYTES, Array, Tensor, TensorSpec, from_array, pack_bytes
from penstock.tasks.base import Brisk, Piece, Prepared, TaskInput, TaskRequest, Weighing
from penstock.tasks.columns import check_outputs
from penstock.tasks.network import find_output, has_image_input, has_text_inputs
from penstock.tasks.numbers import sigmoid, softmax
from penstock.tasks.options import ClassifyOptions, TextLimits
from penstock.tasks.tensor import MAX_ELEMENTS, TensorTask, split_rows

LABEL, SCORE = "label", "score"
LOGITS = "logits"  # which of several outputs it is where classify.output does not say
TOP_K = "top_k"


@dataclass(frozen=True, slots=True)
class RowLimits:
    """How requests may be joined, and how long one may be."""

    max_rows: int
    is_batched: bool | None = None  # None: as the file says
    max_elements: int = MAX_ELEMENTS  # of a BYTES tensor
    texts: TextLimits | None = None  # None: as many rows, of any length


class ClassifyTask:
    is_finish_cheap = True

    def __init__(self, folder: Path, options: ClassifyOptions, limits: RowLimits, engine: Signature) -> None:
        output = _find_output(options, engine)
        self._input = _build_input(folder, options, limits, engine, output)
        self._labels = _read_labels(folder / options.labels)
        _check_labels(options, output, len(self._labels))
        self._packed = np.array([label.encode() for label in self._labels], dtype=object)
        self._activation = options.activation
        self._top_k = options.top_k
        self.is_prepare_cheap = self._input.is_prepare_cheap
        self.brisk_bytes = self._input.brisk_bytes if isinstance(self._input, Brisk) else 0
        self.engine_outputs: Sequence[str] = (output.name,)
        # How many labels an answer has is the request's matter.
        answers = (TensorSpec(LABEL, BYTES, (-1, -1)), TensorSpec(SCORE, "FP32", (-1, -1)))
        self.signature = replace(self._input.signature, outputs=answers)

    def prepare(self, request: TaskRequest) -> Prepared:
        check_outputs(request, (LABEL, SCORE))
        self._wanted_count(request)
        # Without the outputs' names, which are not the network's.
        return self._input.prepare(TaskRequest(request.inputs, []))

    def weigh(self, request: TaskRequest) -> int:
        return self._input.weigh(request) if isinstance(self._input, Weighing) else 0

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        return self._input.join(pieces)

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        return split_rows(pieces, (self._activate(outputs[0]),))

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        scores = prepared.arrange(results)
        best = _best(scores, self._wanted_count(request))
        return [self._answer(name, scores, best) for name in request.outputs or (LABEL, SCORE)]

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        return self._input.warm_up_inputs()

    def _wanted_count(self, request: TaskRequest) -> int:
        given = request.parameters.get(TOP_K, self._top_k)
        if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= len(self._labels):
            raise InvalidRequest(
                f"parameter '{TOP_K}' must be a whole number from 1 to {len(self._labels)}, got {given!r}"
            )
        return given

    def _activate(self, logits: Array) -> Array:
        if logits.ndim != 2 or logits.shape[1] != len(self._labels):
            raise EngineFailed(
                f"the model gave {list(logits.shape)} for [rows, classes], and its labels are {len(self._labels)}: "
                "the labels file needs one line for each class"
            )
        numbers = logits.astype(np.float32, copy=False)
        with np.errstate(invalid="ignore", over="ignore"):  # a model that gives infinities gets no numbers
            if self._activation == "softmax":
                return softmax(numbers)
            return sigmoid(numbers) if self._activation == "sigmoid" else numbers

    def _answer(self, name: str, scores: Array, best: Array) -> Tensor:
        if name == SCORE:
            return from_array(SCORE, np.take_along_axis(scores, best, axis=1))
        return Tensor(LABEL, BYTES, best.shape, pack_bytes(self._packed[best].ravel().tolist()))


def _best(scores: Array, count: int) -> Array:
    """The places of each row's highest scores; of equal ones the first comes first."""
    if count == 1:
        first: Array = scores.argmax(axis=1)
        return first[:, np.newaxis]
    order: Array = np.argsort(-scores, axis=1, kind="stable")
    return order[:, :count]


def _build_input(
    folder: Path, options: ClassifyOptions, limits: RowLimits, engine: Signature, output: TensorSpec
) -> TaskInput:
    """Each imports its libraries only when a model asks for it."""
    kind = _kind(options, engine)
    if kind == "text":
        from penstock.tasks.text import TextNetwork, TextTask

        network = TextNetwork("classify", folder, options, engine, limits.texts or TextLimits(limits.max_rows))
        return TextTask(network, output.name, output)
    if kind == "image":
        from penstock.tasks.images.fitting import ImageInput

        return ImageInput(options, engine, limits.max_rows, is_batched=limits.is_batched is not False)
    tensors = replace(engine, outputs=(output,))
    return TensorTask(tensors, limits.max_rows, limits.is_batched, limits.max_elements)


def _kind(options: ClassifyOptions, engine: Signature) -> str:
    if options.input != "auto":
        return options.input
    if has_text_inputs(engine):
        return "text"
    return "image" if has_image_input(engine) else "tensor"


def _find_output(options: ClassifyOptions, engine: Signature) -> TensorSpec:
    names = [spec.name for spec in engine.outputs]
    name = options.output or (names[0] if len(names) == 1 else LOGITS)
    if name not in names and not options.output:
        raise ConfigError(
            f"classify.output: the network has {', '.join(names)}: say which has a number for each class",
            reason="task_mismatch",
        )
    return find_output(engine, name, "classify.output")


def _read_labels(path: Path) -> list[str]:
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file: write the model's labels into it, one a line, in the order of its output "
            "(or name the file in classify.labels)",
            file=str(path),
            reason="invalid_labels",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read as UTF-8 text: {error}", file=str(path), reason="invalid_labels"
        ) from error
    labels = [line.strip() for line in lines]
    while labels and not labels[-1]:
        labels.pop()
    if not labels or "" in labels:
        line = labels.index("") + 1 if labels else 1
        raise ConfigError(f"{path}: line {line} has no label", file=str(path), reason="invalid_labels")
    return labels


def _check_labels(options: ClassifyOptions, output: TensorSpec, count: int) -> None:
    classes = output.shape[1]
    if classes not in (-1, count):
        raise ConfigError(
            f"classify.labels: {options.labels} has {count} labels, but '{output.name}' has {classes} classes: "
            "write one line for each",
            reason="invalid_labels",
        )
    if options.top_k > count:
        raise ConfigError(
            f"classify.top_k: {options.top_k} is more than the {count} labels; set at most {count}",
            reason="invalid_labels",
        )
