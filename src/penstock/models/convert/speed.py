"""How fast versions of a model are beside each other in this process: they take turns on the same inputs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.models.loading import LoadedModel
from penstock.models.running import BatchArrays, cut, infer_arrays, prepare_all
from penstock.tasks.base import TaskRequest

ROUNDS = 5
REQUESTS = 64
PASS_S = 2.0  # that one pass of the slowest takes at most; with more, fewer requests


@dataclass(frozen=True, slots=True)
class Speed:
    per_s: float  # requests
    rounds: tuple[float, ...]  # the same, round by round

    def over(self, other: "Speed") -> tuple[float, float]:
        """The median of the rounds' ratios, and their spread."""
        ratios = [mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True)]
        return median(ratios), spread(ratios)


def spread(values: Sequence[float]) -> float:
    """The distance of the furthest round from the median, as a share of it."""
    middle = median(values)
    return max(abs(value - middle) for value in values) / middle if middle else 0.0


def take_turns(
    models: Mapping[str, LoadedModel], requests: Sequence[TaskRequest], tell: Callable[[str], None]
) -> dict[str, Speed]:
    chosen = _fitting(models, requests[:REQUESTS])
    inputs = {name: _batches(model, chosen) for name, model in models.items()}
    found: dict[str, list[float]] = {name: [] for name in models}
    for number in range(ROUNDS):
        tell(f"measuring speed: round {number + 1} of {ROUNDS}")
        # Every other round backwards: nobody always follows the same neighbour.
        for name in models if number % 2 == 0 else reversed(list(models)):
            found[name].append(len(chosen) / _pass_s(models[name], inputs[name]))
    return {name: Speed(median(rates), tuple(rates)) for name, rates in found.items()}


def _fitting(models: Mapping[str, LoadedModel], requests: Sequence[TaskRequest]) -> Sequence[TaskRequest]:
    """Also warms every model up."""
    few = requests[: max(2, len(requests) // 8)]
    slowest = max(_pass_s(model, _batches(model, few)) for model in models.values()) / len(few)
    return requests[: max(2, min(len(requests), int(PASS_S / slowest)))]


def _batches(model: LoadedModel, requests: Sequence[TaskRequest]) -> list[BatchArrays]:
    batching = model.settings.batching
    return [
        model.task.join(pieces) for pieces in cut(prepare_all(model, requests), batching.max_rows, batching.max_tokens)
    ]


def _pass_s(model: LoadedModel, batches: Sequence[BatchArrays]) -> float:
    begun = time.perf_counter()
    for batch in batches:
        infer_arrays(model, batch)
    return time.perf_counter() - begun
