"""The results of an experiment, as stored in results.json, and figures over repeats."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from pydantic import Field, ValidationError

from penstock.core.errors import ConfigError
from penstock.experiments.experiment import Case
from penstock.experiments.load.latencies import Latencies, merge
from penstock.experiments.load.steady import spread
from penstock.experiments.sampler import UsageSample
from penstock.experiments.stored_file import StoredFile, StoredModel

FILE = "results.json"
PREVIOUS = "previous.json"
PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "max")


class Accuracy(StoredModel):
    """The similarity of the answers to the answers of the model's original file in FP32."""

    measure: str  # cosine, or PSNR in dB
    mean: float
    lowest: float
    samples: int


class TextRepeat(StoredModel):
    """The figures of one repeat of a case with generated text.

    A figure that was not measured is None, such as the times between tokens if answers are not streamed.
    """

    tokens_per_s: float
    prompt_tokens_per_s: float
    request_tokens_per_s: dict[str, float] | None  # of one answer after its first token: p50, p10, p1
    prompt_tokens_mean: float | None
    output_tokens_mean: float | None
    first_token_ms: dict[str, float] | None
    between_tokens_ms: dict[str, float] | None
    token_ms: dict[str, float] | None  # the mean time between tokens of an answer
    goodput_per_s: float | None  # answers per second that met all latency bounds
    first_token_histogram: str
    between_tokens_histogram: str


class Repeat(StoredModel):
    number: int
    requests_per_s: float
    items_per_s: float
    answered: int
    latency_ms: dict[str, float]  # p50 … max
    latency_histogram: str  # in HdrHistogram's compressed form
    rejected: dict[str, int]
    is_steady: bool
    windows_per_s: list[float]  # requests per second in each window
    measured_s: float
    cpu_percent: dict[str, float]  # by role (gateway, worker), in percent of one core, during the measured windows
    memory_mib: dict[str, float]  # peak by role (gateway, worker)
    generator_cpu_share: float  # CPU share of a process of the load generator; 1 is a whole core
    samples: list[UsageSample]  # of the whole run, including warm-up
    generation: TextRepeat | None = None


class CaseResult(StoredModel):
    case: Case
    unit: str
    not_run: str = ""  # the reason if the case cannot be measured
    accuracy: Accuracy | None = None
    repeats: list[Repeat] = Field(default_factory=list)

    def has_repeat(self, number: int) -> bool:
        return any(repeat.number == number for repeat in self.repeats)

    def figure(self, read_figure: Callable[[Repeat], float]) -> "Figure":
        return Figure([read_figure(repeat) for repeat in self.repeats])

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

    def text(self, read_figure: Callable[[TextRepeat], float | None]) -> "Figure":
        """Return a figure of generated text over the repeats that measured the figure."""
        return Figure([value for value in map(read_figure, self.text_repeats) if value is not None])

    def first_token(self, name: str) -> "Figure":
        return self.text(lambda repeat: (repeat.first_token_ms or {}).get(name))

    @property
    def first_tokens(self) -> Latencies:
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
        return merge(Latencies.decode(repeat.latency_histogram) for repeat in self.repeats)

    @property
    def is_steady(self) -> bool:
        return all(repeat.is_steady for repeat in self.repeats)


class Figure:
    """The values of one figure in several repeats, with their mean and spread."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)

    @property
    def mean(self) -> float:
        return mean(self.values) if self.values else float("nan")

    @property
    def spread(self) -> float | None:
        """The distance of the furthest repeat from the mean, divided by the mean; None for a single repeat."""
        return spread(self.values) if len(self.values) > 1 else None


class Results(StoredFile):
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
        raise ConfigError(f"{file}: cannot read the results: {error.strerror}", file=str(file)) from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not the results of an experiment", file=str(file)) from error
