"""What a run of tuning found, as report.json keeps it."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from penstock.experiments.tuning.search import Decision, Finalist
from penstock.experiments.tuning.space import Candidate, Variant
from penstock.experiments.tuning.trials import Trials

FILE = "report.json"


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Configuration(_Kept):
    engine: str
    precision: str
    device: str
    instances: int
    threads: int
    max_tokens: int | None
    max_rows: int
    max_delay_ms: float

    @classmethod
    def of(cls, candidate: Candidate) -> "Configuration":
        variant = candidate.variant
        return cls(
            engine=variant.engine,
            precision=variant.precision,
            device=variant.device,
            instances=candidate.instances,
            threads=candidate.threads,
            max_tokens=candidate.max_tokens,
            max_rows=candidate.max_rows,
            max_delay_ms=candidate.max_delay_ms,
        )

    def candidate(self) -> Candidate:
        variant = Variant(self.engine, self.precision, self.device)
        return Candidate(variant, self.instances, self.threads, self.max_tokens, self.max_rows, self.max_delay_ms)

    @property
    def variant(self) -> str:
        return str(self.candidate().variant)

    def __str__(self) -> str:
        return str(self.candidate())


class VariantRecord(_Kept):
    name: str
    accuracy: float | None = None
    measure: str = ""
    unit: str = ""
    left_out: str = ""  # why


class Tried(_Kept):
    """One configuration over all its windows."""

    configuration: Configuration
    windows: int
    rate: float  # items a second, the median
    over_shipped: float | None  # of throughput, window by window in the same rounds; the median
    p99_ms: float | None
    failed: str = ""


class Final(_Kept):
    configuration: Configuration
    rate: float
    p99_ms: float
    over_shipped: float  # the median of the rounds' ratios: of throughput, or of 1/p99 where no bound was met
    noise: float  # a lead that is not larger counts for nothing
    lead_of_best: float
    is_equal: bool  # to the best, within noise
    is_within: bool  # the bound on p99


class Applied(_Kept):
    version: str  # that is served with it
    new_folder: str = ""  # of a version that was made
    files: dict[str, str] = {}  # what was written, and the copy of what it was before
    diff: str = ""


class TuneRecord(_Kept):
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
    tried: list[Tried] = []
    untried: list[str] = []
    noise: float | None = None  # of one window's ratio: its standard deviation
    rounds: int = 0  # of the finals
    finals: list[Final] = []
    winner: Configuration | None = None  # None: interrupted
    best: Configuration | None = None
    is_met: bool = True
    changes: dict[str, Any] = {}
    applied: Applied | None = None

    @property
    def is_shipped_best(self) -> bool:
        return self.winner == self.shipped

    def save(self, folder: Path) -> Path:
        """Whole or not at all."""
        file = folder / FILE
        partial = folder / f".{FILE}.{os.getpid()}.partial"
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(file)
        return file


def tried(trials: Trials) -> list[Tried]:
    """The best first; what failed last."""
    measured = [
        Tried(
            configuration=Configuration.of(each),
            windows=len(trials.measures(each)),
            rate=round(trials.rate(each), 2),
            over_shipped=round(trials.ratio(each), 4),
            p99_ms=round(trials.p99_ms(each), 2),
        )
        for each in trials.rank(trials.seen())
    ]
    failed = [
        Tried(configuration=Configuration.of(each), windows=0, rate=0, over_shipped=None, p99_ms=None, failed=why)
        for each, why in trials.refused.items()
        if each != trials.shipped
    ]
    return measured + failed


def final(found: Finalist, best: Candidate) -> Final:
    return Final(
        configuration=Configuration.of(found.candidate),
        rate=round(found.rate, 2),
        p99_ms=round(found.p99_ms, 2),
        over_shipped=round(found.over_shipped.ratio, 4),
        noise=round(found.behind_best.noise, 4),
        lead_of_best=round(found.behind_best.ratio, 4),
        is_equal=found.candidate == best or not found.behind_best.is_better,
        is_within=found.is_within,
    )


def with_decision(record: TuneRecord, decision: Decision, shipped: Candidate) -> TuneRecord:
    return record.model_copy(
        update={
            "finals": [final(found, decision.best) for found in decision.finalists],
            "rounds": max((found.over_shipped.rounds for found in decision.finalists), default=0),
            "winner": Configuration.of(decision.winner),
            "best": Configuration.of(decision.best),
            "is_met": decision.is_met,
            "changes": decision.winner.changes(shipped),
        }
    )
