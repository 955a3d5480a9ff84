"""What a run of tuning found, as report.json keeps it."""

from typing import Any, Literal

from pydantic import Field

from penstock.experiments.kept import Kept, KeptFile
from penstock.experiments.tuning.search import Final
from penstock.experiments.tuning.space import Configuration
from penstock.experiments.tuning.trials import Trials


class VariantRecord(Kept):
    name: str
    accuracy: float | None = None
    measure: str = ""
    unit: str = ""
    left_out: str = ""  # why


class Tried(Kept):
    """One configuration over all its windows."""

    configuration: Configuration
    windows: int
    rate: float  # items a second, the median
    over_shipped: float | None  # of throughput, window by window in the same rounds; the median
    p99_ms: float | None
    failed: str = ""


class Applied(Kept):
    version: str  # that is served with it
    new_folder: str = ""  # of a version that was made
    files: dict[str, str] = Field(default_factory=dict)  # what was written, and the copy of what it was before
    diff: str = ""


class TuneRecord(KeptFile):
    file_name = "report.json"

    format: Literal[1] = 1
    model: str
    task: str
    version: str
    machine: dict[str, str]
    started: str
    seconds: float
    load: dict[str, Any]
    p99_ms: float | None = None
    min_accuracy: float | None = None
    accuracy_measure: str = ""
    shipped: Configuration
    variants: list[VariantRecord]
    tried: list[Tried] = Field(default_factory=list)
    untried: list[str] = Field(default_factory=list)
    noise: float | None = None  # of one window's ratio: its standard deviation
    rounds: int = 0  # of the finals
    finals: list[Final] = Field(default_factory=list)
    winner: Configuration | None = None  # None: interrupted
    best: Configuration | None = None
    is_met: bool = True
    changes: dict[str, Any] = Field(default_factory=dict)
    applied: Applied | None = None

    @property
    def is_shipped_best(self) -> bool:
        return self.winner == self.shipped


def tried(trials: Trials) -> list[Tried]:
    """The best first; what failed last."""
    measured = [
        Tried(
            configuration=each,
            windows=len(trials.measures(each)),
            rate=round(trials.rate(each), 2),
            over_shipped=round(trials.ratio(each), 4),
            p99_ms=round(trials.p99_ms(each), 2),
        )
        for each in trials.rank(trials.seen())
    ]
    failed = [
        Tried(configuration=each, windows=0, rate=0, over_shipped=None, p99_ms=None, failed=why)
        for each, why in trials.refused.items()
        if each != trials.shipped
    ]
    return measured + failed
