"""How near a variant's answers are to those of the original in FP32, through the task itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.tensors import BYTES, Array, Tensor, to_array, unpack_bytes
from penstock.models.convert.ranks import cosines, distribution, psnr_db, rank_agreement
from penstock.models.convert.samples import Samples
from penstock.models.loading import LoadedModel
from penstock.models.running import answer
from penstock.tasks.base import TaskRequest
from penstock.tasks.images import decode, read_header

Answers = list[list[list[Tensor]]]  # by group and by request
Measured = tuple[float, dict[str, Any]]  # what is held against the floor, and what else there is to tell


@dataclass(frozen=True, slots=True)
class Rule:
    """How a task's answers are compared, and the floor where none is asked for."""

    measure: str
    floor: float
    compare: Callable[[Answers, Answers], Measured]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Fidelity:
    measure: str
    value: float
    samples: int
    details: Mapping[str, Any] = field(default_factory=dict)
    unit: str = ""


def answer_all(model: LoadedModel, groups: Sequence[Sequence[TaskRequest]]) -> Answers:
    return [[answer(model, request) for request in group] for group in groups]


class Reference:
    """The original's answers, made once and held against those of every variant."""

    def __init__(self, task: str, original: LoadedModel, samples: Samples) -> None:
        self._task = task
        self._samples = samples
        self._answers = answer_all(original, samples.held_out)

    def compare(self, variant: LoadedModel) -> Fidelity:
        return compare_answers(self._task, self._answers, answer_all(variant, self._samples.held_out))


def compare_answers(task: str, expected: Answers, found: Answers) -> Fidelity:
    if _are_numbers(expected) and not _are_numbers(found):
        raise ConfigError("its answers are no numbers any more (NaN or infinite)")
    rule = rule_of(task)
    value, details = rule.compare(expected, found)
    return Fidelity(rule.measure, round(value, 6), sum(map(len, expected)), details, rule.unit)


def _embeddings(expected: Answers, found: Answers) -> Measured:
    """The first group asks; the second, where there is one, is ranked for each of its texts."""
    one, other = ([_vectors(group) for group in answers] for answers in (expected, found))
    values = cosines(np.concatenate(one), np.concatenate(other))
    details: dict[str, Any] = {"cosine": distribution(values)}
    if len(one) > 1:
        details["ranks"] = rank_agreement(_similarities(*one), _similarities(*other))
    return float(values.mean()), details


def _scores(expected: Answers, found: Answers) -> Measured:
    one, other = (np.array([[_numbers(answer)[0] for answer in group] for group in side]) for side in (expected, found))
    ranks = rank_agreement(one, other)
    difference = np.abs(one - other)
    details = {
        "ranks": ranks,
        "difference": {"max": round(float(difference.max()), 6), "mean": round(float(difference.mean()), 6)},
    }
    return ranks["spearman"], details


def _labels(expected: Answers, found: Answers) -> Measured:
    pairs = list(zip(chain(*expected), chain(*found), strict=True))
    best = [unpack_bytes(_named(a, "label"))[0] == unpack_bytes(_named(b, "label"))[0] for a, b in pairs]
    changes = [abs(float(_of(a, "score")[0] - _of(b, "score")[0])) for a, b in pairs]
    details = {"agree": sum(best), "of": len(best), "score_difference_max": round(max(changes), 6)}
    return float(np.mean(best)), details


def _images(expected: Answers, found: Answers) -> Measured:
    values = [psnr_db(_pixels(a), _pixels(b)) for a, b in zip(chain(*expected), chain(*found), strict=True)]
    details = {"psnr_db": {"mean": round(float(np.mean(values)), 4), "min": round(min(values), 4)}}
    return float(np.mean(values)), details


def _tensors(expected: Answers, found: Answers) -> Measured:
    one, other = (np.stack([_numbers(answer) for answer in chain(*side)]) for side in (expected, found))
    values = cosines(one, other)
    largest = np.maximum(np.abs(one).max(axis=1), np.finfo(np.float64).tiny)
    errors = np.abs(one - other).max(axis=1) / largest
    details = {"cosine": distribution(values), "relative_error_max": round(float(errors.max()), 6)}
    return float(values.mean()), details


_RULES: Mapping[str, Rule] = {
    "embed": Rule("mean cosine", 0.98, _embeddings),
    "score": Rule("mean rank correlation", 0.95, _scores),
    "classify": Rule("label agreement", 0.98, _labels),
    "upscale": Rule("mean PSNR", 40.0, _images, "dB"),
}
_TENSORS = Rule("mean cosine", 0.98, _tensors)


def rule_of(task: str) -> Rule:
    """A task that nobody knows is judged by its numbers."""
    return _RULES.get(task, _TENSORS)


def _are_numbers(answers: Answers) -> bool:
    tensors = (tensor for group in answers for answer in group for tensor in answer if tensor.datatype != BYTES)
    return all(np.isfinite(to_array(tensor).astype(np.float64)).all() for tensor in tensors)


def _vectors(group: Sequence[Sequence[Tensor]]) -> Array:
    return np.concatenate([to_array(answer[0]) for answer in group])


def _similarities(asked: Array, ranked: Array) -> Array:
    def unit(rows: Array) -> Array:
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.where(lengths > 0, lengths, 1.0)

    found: Array = unit(asked) @ unit(ranked).T
    return found


def _numbers(answer: Sequence[Tensor]) -> Array:
    """All numbers that an answer has, in a row."""
    arrays = [to_array(tensor).ravel() for tensor in answer if tensor.datatype != BYTES]
    if not arrays:
        raise ConfigError("its answers have no numbers to compare")
    return np.concatenate([array.astype(np.float64) for array in arrays])


def _named(answer: Sequence[Tensor], name: str) -> Tensor:
    return next(tensor for tensor in answer if tensor.name == name)


def _of(answer: Sequence[Tensor], name: str) -> Array:
    return to_array(_named(answer, name)).ravel()


def _pixels(answer: Sequence[Tensor]) -> Array:
    return np.asarray(decode(read_header(unpack_bytes(answer[0])[0])).image)
