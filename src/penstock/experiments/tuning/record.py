"""What a run of tuning found, as report.json keeps it."""

from typing import Any, Literal

from pydantic import Field

from penstock.experiments.kept import Kept, KeptFile
from penstock.experiments.tuning.search import Decision, Finalist
from penstock.experiments.tuning.space import Configuration
from penstock.experiments.tuning.trials import Trials

FILE = "report.json"


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


class Final(Kept):
    configuration: Configuration
    rate: float
    p99_ms: float
    over_shipped: float  # the median of the rounds' ratios: of throughput, or of 1/p99 where no bound was met
    noise: float  # a lead that is not larger counts for nothing
    lead_of_best: float
    is_equal: bool  # to the best, within noise
    is_within: bool  # the bound on p99


class Applied(Kept):
    version: str  # that is served with it
    new_folder: str = ""  # of a version that was made
    files: dict[str, str] = Field(default_factory=dict)  # what was written, and the copy of what it was before
    diff: str = ""


class TuneRecord(KeptFile):
    file_name = FILE

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


def final(found: Finalist, best: Configuration) -> Final:
    return Final(
        configuration=found.candidate,
        rate=round(found.rate, 2),
        p99_ms=round(found.p99_ms, 2),
        over_shipped=round(found.over_shipped.ratio, 4),
        noise=round(found.behind_best.noise, 4),
        lead_of_best=round(found.behind_best.ratio, 4),
        is_equal=found.candidate == best or not found.behind_best.is_better,
        is_within=found.is_within,
    )


def with_decision(record: TuneRecord, decision: Decision, shipped: Configuration) -> TuneRecord:
    return record.model_copy(
        update={
            "finals": [final(found, decision.best) for found in decision.finalists],
            "rounds": max((found.over_shipped.rounds for found in decision.finalists), default=0),
            "winner": decision.winner,
            "best": decision.best,
            "is_met": decision.is_met,
            "changes": decision.winner.changes(shipped),
        }
    )
