"""The classify task: returns the best labels and their scores for images, texts or tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.core.errors import ConfigError, EngineFailed, InvalidRequest
from penstock.core.signature import Signature
from penstock.core.tensors import BYTES, Array, Tensor, TensorSpec, from_array, pack_bytes
from penstock.tasks.activations import sigmoid, softmax
from penstock.tasks.base import EstimatesMemory, Piece, Prepared, PreparesInline, TaskInput, TaskRequest
from penstock.tasks.columns import check_outputs
from penstock.tasks.network import find_output, has_image_input, has_text_inputs
from penstock.tasks.options import LABELS_FILE, ClassifyOptions, TextLimits
from penstock.tasks.tensor import TensorTask, split_rows

LABEL, SCORE = "label", "score"
LOGITS = "logits"  # the network's output to use if there are several and classify.output is not set
TOP_K = "top_k"


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Limits on the size of batches and requests."""

    max_rows: int
    is_batched: bool | None = None  # None: the model's file decides
    texts: TextLimits | None = None  # None: max_rows texts of any length


class ClassifyTask:
    """Converts images, texts or tensors to the network's input, and the network's output to labels and scores."""

    is_finish_cheap = True

    def __init__(self, folder: Path, options: ClassifyOptions, limits: RowLimits, engine: Signature) -> None:
        output = _find_output(options, engine)
        self._input = _build_input(folder, options, limits, engine, output)
        self._labels = _read_labels(folder / LABELS_FILE)
        _check_labels(options, output, len(self._labels))
        self._packed = np.array([label.encode() for label in self._labels], dtype=object)
        self._activation = options.activation
        self._top_k = options.top_k
        self.is_prepare_cheap = self._input.is_prepare_cheap
        self.inline_bytes = self._input.inline_bytes if isinstance(self._input, PreparesInline) else 0
        self.engine_outputs: Sequence[str] = (output.name,)
        # The request chooses the number of labels.
        answers = (TensorSpec(LABEL, BYTES, (-1, -1)), TensorSpec(SCORE, "FP32", (-1, -1)))
        self.signature = replace(self._input.signature, outputs=answers)

    def prepare(self, request: TaskRequest) -> Prepared:
        check_outputs(request, (LABEL, SCORE))
        self._read_top_k(request)
        # The requested outputs are left out, because the task input would reject their names.
        return self._input.prepare(TaskRequest(request.inputs, []))

    def weigh(self, request: TaskRequest) -> int:
        return self._input.weigh(request) if isinstance(self._input, EstimatesMemory) else 0

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        return self._input.join(pieces)

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        return split_rows(pieces, (self._compute_scores(outputs[0]),))

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        scores = prepared.arrange(results)
        best = _best_indices(scores, self._read_top_k(request))
        return [self._make_output(name, scores, best) for name in request.outputs or (LABEL, SCORE)]

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        return self._input.warm_up_inputs()

    def _read_top_k(self, request: TaskRequest) -> int:
        given = request.parameters.get(TOP_K, self._top_k)
        if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= len(self._labels):
            raise InvalidRequest(
                f"parameter '{TOP_K}' must be a whole number from 1 to {len(self._labels)}, got {given!r}"
            )
        return given

    def _compute_scores(self, logits: Array) -> Array:
        if logits.ndim != 2 or logits.shape[1] != len(self._labels):
            raise EngineFailed(
                f"the model's output has the shape {list(logits.shape)}, but [rows, {len(self._labels)}] was expected: "
                "the labels file needs one line for each class"
            )
        numbers = logits.astype(np.float32, copy=False)
        with np.errstate(invalid="ignore", over="ignore"):  # infinities become NaN
            if self._activation == "softmax":
                return softmax(numbers)
            return sigmoid(numbers) if self._activation == "sigmoid" else numbers

    def _make_output(self, name: str, scores: Array, best: Array) -> Tensor:
        if name == SCORE:
            return from_array(SCORE, np.take_along_axis(scores, best, axis=1))
        return Tensor(LABEL, BYTES, best.shape, pack_bytes(self._packed[best].ravel().tolist()))


def _best_indices(scores: Array, count: int) -> Array:
    """Return the indices of each row's highest scores; equal scores keep their order."""
    if count == 1:
        first: Array = scores.argmax(axis=1)
        return first[:, np.newaxis]
    order: Array = np.argsort(-scores, axis=1, kind="stable")
    return order[:, :count]


def _build_input(
    folder: Path, options: ClassifyOptions, limits: RowLimits, engine: Signature, output: TensorSpec
) -> TaskInput:
    """Return the task input for the model (for images, texts or tensors); import only the libraries that it needs."""
    kind = _choose_input_kind(options, engine)
    if kind == "text":
        from penstock.tasks.text import TextNetwork, TextTask

        network = TextNetwork("classify", folder, options, engine, limits.texts or TextLimits(limits.max_rows))
        return TextTask(network, output.name, output)
    if kind == "image":
        from penstock.tasks.images.image_input import ImageInput

        return ImageInput(options, engine, limits.max_rows, is_batched=limits.is_batched is not False)
    tensors = replace(engine, outputs=(output,))
    return TensorTask(tensors, limits.max_rows, limits.is_batched)


def _choose_input_kind(options: ClassifyOptions, engine: Signature) -> str:
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
            f"classify.output: the network's outputs are {', '.join(names)}: "
            "set classify.output to the one with a number for each class",
            reason="task_mismatch",
        )
    return find_output(engine, name, "classify.output")


def _read_labels(path: Path) -> list[str]:
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file: create the file with one label per line, in the order of the model's output",
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
        raise ConfigError(
            f"{path}: line {line} has no label: write one label in each line", file=str(path), reason="invalid_labels"
        )
    return labels


def _check_labels(options: ClassifyOptions, output: TensorSpec, count: int) -> None:
    classes = output.shape[1]
    if classes not in (-1, count):
        raise ConfigError(
            f"{LABELS_FILE} has {count} labels, but '{output.name}' has {classes} classes: write one line for each",
            reason="invalid_labels",
        )
    if options.top_k > count:
        raise ConfigError(
            f"classify.top_k: {options.top_k} is more than the {count} labels; set at most {count}",
            reason="invalid_labels",
        )
