"""Measures the accuracy of a converted model: how similar its answers are to those of the original in FP32."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.tensors import BYTES, to_array
from penstock.models.convert.calibration_samples import Samples
from penstock.models.loading import LoadedModel
from penstock.models.running import answer
from penstock.tasks.base import TaskRequest
from penstock.tasks.built_in import load_description
from penstock.tasks.comparison import Answers


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
    """The original model's answers, which are computed once; compares each converted variant's answers with them."""

    def __init__(self, task: str, original: LoadedModel, samples: Samples) -> None:
        self._task = task
        self._samples = samples
        self._answers = answer_all(original, samples.held_out)

    def compare(self, variant: LoadedModel) -> Fidelity:
        return compare_answers(self._task, self._answers, answer_all(variant, self._samples.held_out))


def compare_answers(task: str, expected: Answers, actual: Answers) -> Fidelity:
    if _are_finite(expected) and not _are_finite(actual):
        raise ConfigError("the variant's answers are NaN or infinite, but the original's answers are finite")
    comparison = load_description(task).comparison
    value, details = comparison.compare(expected, actual)
    return Fidelity(comparison.measure, round(value, 6), sum(map(len, expected)), details, comparison.unit)


def _are_finite(answers: Answers) -> bool:
    tensors = (tensor for answer in chain(*answers) for tensor in answer if tensor.datatype != BYTES)
    return all(np.isfinite(to_array(tensor).astype(np.float64)).all() for tensor in tensors)
