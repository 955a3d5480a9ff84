"""The results of an experiment: what is kept in results.json, and the figures of its repeats."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from pydantic import Field, ValidationError

from penstock.core.errors import ConfigError
from penstock.experiments.experiment import Case
from penstock.experiments.kept import Kept, KeptFile
from penstock.experiments.load.latencies import Latencies, merge
from penstock.experiments.load.steady import spread
from penstock.experiments.sampler import UsageSample

FILE = "results.json"
PREVIOUS = "previous.json"
PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "max")


class Accuracy(Kept):
    """How near the answers are to those of the model's own file in FP32."""

    measure: str  # cosine, or PSNR in dB
    mean: float
    lowest: float
    samples: int


class TextRepeat(Kept):
    """Of generated text. What was not measured is none: nobody sees tokens of answers that come whole."""

    tokens_per_s: float
    prompt_tokens_per_s: float
    request_tokens_per_s: dict[str, float] | None  # of an answer, after its first token: p50, p10, p1
    prompt_tokens_mean: float | None
    output_tokens_mean: float | None
    first_token_ms: dict[str, float] | None
    between_tokens_ms: dict[str, float] | None
    token_ms: dict[str, float] | None  # an answer's mean of the times between its tokens
    goodput_per_s: float | None  # answers within all bounds
    first_token_histogram: str
    between_tokens_histogram: str


class Repeat(Kept):
    number: int
    requests_per_s: float
    items_per_s: float
    answered: int
    latency_ms: dict[str, float]  # p50 … max
    latency_histogram: str  # HdrHistogram's own form
    rejected: dict[str, int]
    is_steady: bool
    windows_per_s: list[float]  # requests a second, window by window
    measured_s: float
    cpu_percent: dict[str, float]  # by role, of one core, over what was measured
    memory_mib: dict[str, float]  # by role, the most
    generator_cpu_share: float  # of the core that each of its processes has
    samples: list[UsageSample]  # over the whole run, warm-up included
    generation: TextRepeat | None = None


class CaseResult(Kept):
    case: Case
    unit: str
    not_run: str = ""  # why
    accuracy: Accuracy | None = None
    repeats: list[Repeat] = Field(default_factory=list)

    def has(self, number: int) -> bool:
        return any(repeat.number == number for repeat in self.repeats)

    def figure(self, of: Callable[[Repeat], float]) -> "Figure":
        return Figure([of(repeat) for repeat in self.repeats])

    @property
    def rps(self) -> "Figure":
        return self.figure(lambda repeat: repeat.requests_per_s)

    @property
    def items_per_s(self) -> "Figure":
        return self.figure(lambda repeat: repeat.items_per_s)

    def latency(self, name: str) -> "Figure":
        return self.figure(lambda repeat: repeat.latency_ms[name])

    @property
    def text_repeats(self) -> list[TextRepeat]:
        return [repeat.generation for repeat in self.repeats if repeat.generation is not None]

    def text(self, of: Callable[[TextRepeat], float | None]) -> "Figure":
        """What was not measured is not among its values."""
        return Figure([value for value in map(of, self.text_repeats) if value is not None])

    def first_token(self, name: str) -> "Figure":
        return self.text(lambda repeat: (repeat.first_token_ms or {}).get(name))

    @property
    def first_tokens(self) -> Latencies:
        """All repeats together."""
        return merge(Latencies.decode(each.first_token_histogram) for each in self.text_repeats)

    @property
    def times_between(self) -> Latencies:
        return merge(Latencies.decode(each.between_tokens_histogram) for each in self.text_repeats)

    def between_tokens(self, name: str) -> "Figure":
        return self.text(lambda repeat: (repeat.between_tokens_ms or {}).get(name))

    @property
    def cpu_percent(self) -> "Figure":
        return self.figure(lambda repeat: sum(repeat.cpu_percent.values()))

    @property
    def memory_mib(self) -> "Figure":
        return self.figure(lambda repeat: sum(repeat.memory_mib.values()))

    @property
    def latencies(self) -> Latencies:
        """All repeats together."""
        return merge(Latencies.decode(repeat.latency_histogram) for repeat in self.repeats)

    @property
    def is_steady(self) -> bool:
        return all(repeat.is_steady for repeat in self.repeats)


class Figure:
    """A value over repeats."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)

    @property
    def mean(self) -> float:
        return mean(self.values) if self.values else float("nan")

    @property
    def spread(self) -> float | None:
        """The furthest repeat's distance from the mean, as a share of it; one repeat does not tell."""
        return spread(self.values) if len(self.values) > 1 else None


class Results(KeptFile):
    file_name = FILE

    format: Literal[1] = 1
    experiment: str
    description: str = ""
    settings: dict[str, Any]
    settings_hash: str
    machine: dict[str, str]
    started: str  # ISO 8601
    updated: str
    cases: list[CaseResult]

    def result(self, case_id: str) -> CaseResult:
        return next(result for result in self.cases if result.case.id == case_id)


def read_results(path: Path) -> Results:
    file = path / FILE if path.is_dir() else path
    try:
        return Results.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: no results there: {error.strerror}", file=str(file)) from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: these are not the results of an experiment", file=str(file)) from error
