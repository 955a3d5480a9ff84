"""The figures that a run must reach, each a ratio of measurements of that run."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median

from benchmarks.suite.measure import LoadRow
from penstock.models.convert.speed import spread
from penstock.models.engine_choice.candidates import BF16_FEATURES
from penstock.telemetry.machine import read_processor_features


@dataclass(frozen=True, slots=True)
class SuiteFigure:
    key: str
    value: float
    spread: float
    bar: float
    is_ceiling: bool = False  # True: the value must stay below the bar
    rounds: int = 1

    @property
    def is_met(self) -> bool:
        return self.value <= self.bar if self.is_ceiling else self.value >= self.bar


def ratio(
    key: str, above: Sequence[float], below: Sequence[float], bar: float, is_ceiling: bool = False
) -> SuiteFigure:
    """Return the ratio of the medians, with the spread of the ratios of the rounds."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return SuiteFigure(key, median(ratios), spread(ratios), bar, is_ceiling, len(ratios))


def choose_auto_bar(features: Set[str]) -> float:
    """Return the bar for `engine: auto`: the gain of BF16 if the processor supports it, otherwise no loss."""
    return 1.5 if features & set(BF16_FEATURES) else 1.0


def compute(rows: Mapping[str, LoadRow], ceiling: Sequence[float], only: Callable[[str], bool]) -> list[SuiteFigure]:
    def rps(name: str) -> list[float]:
        return rows[name].rps

    def p50(name: str) -> list[float]:
        return [found[50] for found in rows[name].percentiles_ms]

    found: list[SuiteFigure] = []
    if only("text"):
        found += [
            ratio("served_over_ceiling", rps("mixed grpc"), ceiling, 0.90),
            ratio("served_over_ceiling_stream", rps("mixed stream"), ceiling, 0.90),
            ratio("served_over_ceiling_rest", rps("mixed rest"), ceiling, 0.90),
            ratio("budget_over_arrival32", rps("mixed grpc"), rps("mixed arrival-32"), 2.0),
            ratio(
                "auto_over_onnx_fp32",
                rps("mixed as shipped"),
                rps("mixed grpc"),
                choose_auto_bar(read_processor_features()),
            ),
        ]
    if only("queries"):
        found.append(ratio("queries_batched_over_single", rps("queries batched"), rps("queries single"), 2.5))
    if only("int8"):
        found.append(ratio("int8_over_fp32", rps("int8 grpc"), rps("int8's fp32 grpc"), 2.0))
    if only("noop"):
        found += [
            ratio("noop_p50_over_echo", p50("noop grpc c1"), p50("echo c1"), 2.0, is_ceiling=True),
            ratio("noop_rps_over_echo", rps("noop grpc c32"), rps("echo c32"), 0.45),
            ratio("noop_rest_rps_over_echo", rps("noop rest c32"), rps("echo c32"), 0.45),
            ratio("noop_rest_rps_over_grpc", rps("noop rest c32"), rps("noop grpc c32"), 1.0),
        ]
    if only("cache"):
        found.append(ratio("cache_hit_p50_over_echo", p50("cache hit c1"), p50("cache echo c1"), 1.3, is_ceiling=True))
    return found


def make_decision_figure(rounds: Mapping[str, Sequence[tuple[float, float]]]) -> SuiteFigure:
    """Return the cost of a decision with 1,000 workers divided by that with 10, for the policy where it grows most."""
    key = "decision_cost_1000_over_10_workers"
    found = [
        ratio(key, [many for _, many in costs], [few for few, _ in costs], 1.2, is_ceiling=True)
        for costs in rounds.values()
    ]
    return max(found, key=lambda figure: figure.value)
