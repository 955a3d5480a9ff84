"""The results of a tuning run, as stored in report.json."""

from typing import Any, Literal

from pydantic import Field

from penstock.experiments.stored_file import StoredFile, StoredModel
from penstock.experiments.tuning.search import Final
from penstock.experiments.tuning.space import Configuration
from penstock.experiments.tuning.trials import Trials


class VariantRecord(StoredModel):
    name: str
    accuracy: float | None = None
    measure: str = ""
    unit: str = ""
    left_out: str = ""  # the reason if the variant is not a candidate


class TriedConfiguration(StoredModel):
    """The figures of one tried configuration over all its measuring windows."""

    configuration: Configuration
    windows: int
    rate: float  # median of items per second
    over_shipped: float | None  # median of the ratios to the shipped configuration's throughput in the same rounds
    p99_ms: float | None
    failed: str = ""


class Applied(StoredModel):
    version: str  # the version that is served with the winner
    new_folder: str = ""  # the folder of the new version, if one was created
    # changed files and their backups; an empty backup: the file is new
    files: dict[str, str] = Field(default_factory=dict)
    diff: str = ""


class TuneRecord(StoredFile):
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
    tried: list[TriedConfiguration] = Field(default_factory=list)
    untried: list[str] = Field(default_factory=list)
    noise: float | None = None  # standard deviation of the ratio of two windows
    rounds: int = 0  # rounds of the finals
    finals: list[Final] = Field(default_factory=list)
    winner: Configuration | None = None  # None: the run was interrupted
    best: Configuration | None = None
    is_met: bool = True
    changes: dict[str, Any] = Field(default_factory=dict)
    applied: Applied | None = None

    @property
    def is_shipped_best(self) -> bool:
        return self.winner == self.shipped


def list_tried(trials: Trials) -> list[TriedConfiguration]:
    """Return the tried configurations, the best first and the failed ones last."""
    measured = [
        TriedConfiguration(
            configuration=each,
            windows=len(trials.measures(each)),
            rate=round(trials.rate(each), 2),
            over_shipped=round(trials.ratio(each), 4),
            p99_ms=round(trials.p99_ms(each), 2),
        )
        for each in trials.rank(trials.list_tried())
    ]
    failed = [
        TriedConfiguration(configuration=each, windows=0, rate=0, over_shipped=None, p99_ms=None, failed=why)
        for each, why in trials.refused.items()
        if each != trials.shipped
    ]
    return measured + failed
