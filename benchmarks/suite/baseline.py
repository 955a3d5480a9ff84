"""The ratios of earlier runs, and whether a new run is worse by more than noise."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.suite.figures import SuiteFigure
from penstock.core.errors import ConfigError

KEPT_RUNS = 7
MIN_NOISE = 0.03  # assumed noise if only one run is known


@dataclass(frozen=True, slots=True)
class BaselineVerdict:
    key: str
    value: float
    expected: float
    noise: float  # difference between two runs of unchanged code, as a share
    is_ceiling: bool

    @property
    def change(self) -> float:
        """Return the change as a share of the expected value; above 0 is better."""
        gain = self.value / self.expected - 1
        return -gain if self.is_ceiling else gain

    @property
    def is_worse(self) -> bool:
        return self.change < -self.noise


class Baseline:
    """The values of each figure in the last runs, and the spread of their rounds."""

    def __init__(self, runs: dict[str, list[dict[str, float]]]) -> None:
        self._runs = runs

    @classmethod
    def read(cls, file: Path) -> "Baseline":
        try:
            found: dict[str, Any] = json.loads(file.read_text())
            return cls({key: [_check(run) for run in entry["runs"]] for key, entry in found["figures"].items()})
        except FileNotFoundError as error:
            raise ConfigError(f"{file}: there is no baseline; make one with --update-baseline") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}: is no baseline ({error}); make one with --update-baseline") from error

    def write(self, file: Path) -> None:
        """Write the runs; the value and its noise are also written for readers, but not read back."""
        figures = {
            key: {"value": round(self.value(key), 4), "noise": round(self._compute_spread(key), 4), "runs": runs}
            for key, runs in sorted(self._runs.items())
        }
        file.write_text(json.dumps({"figures": figures}, indent=2) + "\n")

    def value(self, key: str) -> float:
        return median(run["value"] for run in self._runs[key])

    def append_run(self, figures: Sequence[SuiteFigure]) -> "Baseline":
        runs = dict(self._runs)
        for figure in figures:
            run = {"value": round(figure.value, 4), "error": round(compute_standard_error(figure), 4)}
            runs[figure.key] = [*runs.get(figure.key, []), run][-KEPT_RUNS:]
        return Baseline(runs)

    def compare(self, figures: Sequence[SuiteFigure]) -> list[BaselineVerdict]:
        """Compare the figures that the baseline contains."""
        return [self._judge(figure) for figure in figures if figure.key in self._runs]

    def _judge(self, figure: SuiteFigure) -> BaselineVerdict:
        within = max([compute_standard_error(figure), *(run["error"] for run in self._runs[figure.key])])
        noise = self._compute_spread(figure.key) + 2 * within
        return BaselineVerdict(figure.key, figure.value, self.value(figure.key), noise, figure.is_ceiling)

    def _compute_spread(self, key: str) -> float:
        """Return the spread of the known runs around their median."""
        middle = self.value(key)
        distances = [abs(run["value"] / middle - 1) for run in self._runs[key]]
        return max(distances) if len(distances) > 1 else MIN_NOISE


def compute_standard_error(figure: SuiteFigure) -> float:
    """Return the standard error of the median of the rounds, as a share.

    `spread` is the largest distance of `rounds` from it.
    """
    return figure.spread / math.sqrt(max(1, figure.rounds))


def _check(run: dict[str, Any]) -> dict[str, float]:
    found = {"value": float(run["value"]), "error": float(run["error"])}
    if not (found["value"] > 0 and found["error"] >= 0):
        raise ValueError(f"a run of value {found['value']} and error {found['error']}")
    return found
