"""How fast versions of a model are beside each other in this process: they take turns on the same inputs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.models.loading import LoadedModel
from penstock.models.running import BatchArrays, cut, infer_arrays, prepare_all
from penstock.tasks.base import TaskRequest

REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Turns:
    rounds: int = 5
    pass_s: float = 2.0  # that one pass of the slowest takes at most; with more, fewer requests
    clock: Callable[[], float] = time.perf_counter


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
    models: Mapping[str, LoadedModel],
    requests: Sequence[TaskRequest],
    tell: Callable[[str], None] = lambda _: None,
    turns: Turns = Turns(),  # noqa: B008 - it never changes
) -> dict[str, Speed]:
    chosen = _fitting(models, requests[:REQUESTS], turns)
    inputs = {name: _batches(model, chosen) for name, model in models.items()}
    found: dict[str, list[float]] = {name: [] for name in models}
    for number in range(turns.rounds):
        tell(f"measuring speed: round {number + 1} of {turns.rounds}")
        # Every other round backwards: nobody always follows the same neighbour.
        for name in models if number % 2 == 0 else reversed(list(models)):
            found[name].append(len(chosen) / _pass_s(models[name], inputs[name], turns.clock))
    return {name: Speed(median(rates), tuple(rates)) for name, rates in found.items()}


def _fitting(models: Mapping[str, LoadedModel], requests: Sequence[TaskRequest], turns: Turns) -> Sequence[TaskRequest]:
    """Also warms every model up."""
    few = requests[: max(2, len(requests) // 8)]
    slowest = max(_pass_s(model, _batches(model, few), turns.clock) for model in models.values()) / len(few)
    return requests[: max(2, min(len(requests), int(turns.pass_s / slowest)))]


def _batches(model: LoadedModel, requests: Sequence[TaskRequest]) -> list[BatchArrays]:
    batching = model.settings.batching
    return [
        model.task.join(pieces) for pieces in cut(prepare_all(model, requests), batching.max_rows, batching.max_tokens)
    ]


def _pass_s(model: LoadedModel, batches: Sequence[BatchArrays], clock: Callable[[], float]) -> float:
    begun = clock()
    for batch in batches:
        infer_arrays(model, batch)
    return clock() - begun
