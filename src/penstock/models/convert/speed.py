"""Compares the speed of models in this process. The models take turns with the same inputs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.models.loading import LoadedModel
from penstock.models.running import BatchArrays, cut_into_batches, infer_arrays, join, prepare_all
from penstock.tasks.base import TaskRequest

REQUESTS = 64


@dataclass(frozen=True, slots=True)
class MeasuringTurns:
    rounds: int = 5
    pass_s: float = 2.0  # time limit of a round of the slowest model; some requests are left out if it takes longer
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class Speed:
    per_s: float  # requests
    rounds: tuple[float, ...]  # by round

    def compare_with(self, other: "Speed") -> tuple[float, float]:
        """Return how many times as fast this model is as the other one (the median of all rounds), and the spread."""
        ratios = [mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True)]
        return median(ratios), spread(ratios)

    def certain_gain(self, other: "Speed") -> float:
        """Return the speed ratio minus its spread between rounds, so that 1.5 ±5% counts more than 1.7 ±40%."""
        ratio, noise = self.compare_with(other)
        return ratio * (1 - noise)


def spread(values: Sequence[float]) -> float:
    """Return the largest distance of a value from the median, divided by the median."""
    middle = median(values)
    return max(abs(value - middle) for value in values) / middle if middle else 0.0


def measure_speeds(
    models: Mapping[str, LoadedModel],
    requests: Sequence[TaskRequest],
    report: Callable[[str], None] = lambda _: None,
    turns: MeasuringTurns = MeasuringTurns(),  # noqa: B008 - immutable
) -> dict[str, Speed]:
    chosen = _choose_requests(models, requests[:REQUESTS], turns)
    inputs = {name: _prepare_batches(model, chosen) for name, model in models.items()}
    found: dict[str, list[float]] = {name: [] for name in models}
    for number in range(turns.rounds):
        report(f"measuring speed: round {number + 1} of {turns.rounds}")
        # Every other round runs backwards, so that the order does not favour a model.
        for name in models if number % 2 == 0 else reversed(list(models)):
            found[name].append(len(chosen) / _measure_pass_s(models[name], inputs[name], turns.clock))
    return {name: Speed(median(rates), tuple(rates)) for name, rates in found.items()}


def _choose_requests(
    models: Mapping[str, LoadedModel], requests: Sequence[TaskRequest], turns: MeasuringTurns
) -> Sequence[TaskRequest]:
    """Return the requests that the slowest model can run within `pass_s`. This also warms up all models."""
    few = requests[: max(2, len(requests) // 8)]
    slowest = max(_measure_pass_s(model, _prepare_batches(model, few), turns.clock) for model in models.values()) / len(
        few
    )
    return requests[: max(2, min(len(requests), int(turns.pass_s / slowest)))]


def _prepare_batches(model: LoadedModel, requests: Sequence[TaskRequest]) -> list[BatchArrays]:
    batching = model.settings.batching
    pieces = prepare_all(model, requests)
    return [join(model, batch) for batch in cut_into_batches(pieces, batching.max_rows, batching.max_tokens)]


def _measure_pass_s(model: LoadedModel, batches: Sequence[BatchArrays], clock: Callable[[], float]) -> float:
    begun = clock()
    for batch in batches:
        infer_arrays(model, batch)
    return clock() - begun
