"""One repeat of one case on a running server: load, windows, CPU and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.experiments.experiment import SHAPE_KEYS, Case, ExperimentPart, digest
from penstock.experiments.load.generator import HEAD_START_S, Generator
from penstock.experiments.load.loadtest import OPEN_CONNECTIONS
from penstock.experiments.load.payloads import build, encode
from penstock.experiments.load.process import LoadSpec, TextSpec, Window, WindowOutcome, write_messages
from penstock.experiments.load.prompts import GenerationShape, build_prompts, encode_prompts
from penstock.experiments.load.steady import (
    AGREEING,
    Measured,
    NothingAnswered,
    agree,
    is_enough,
    is_hopeless,
    measured,
)
from penstock.experiments.load.tokens import summarize
from penstock.experiments.processes import ServerRun
from penstock.experiments.results import Repeat, TextRepeat
from penstock.experiments.sampler import Sampler, mean_cpu, peak_mib

COUNTED_WINDOW_S = 0.5  # of a run that ends with a number of answers: it ends with the window that has them
MOST_COUNTED_S = 600.0


@dataclass(frozen=True, slots=True)
class CaseRun:
    """`folder` gets the files of requests, which cases share."""

    server: ServerRun
    folder: Path
    part: ExperimentPart
    msmarco: Path | None = None

    def measure(self, case: Case, number: int) -> Repeat:
        target = self.server.http if case.protocol == "rest" else self.server.grpc
        text = TextSpec(case.stream, self.part.bounds) if case.is_text else None
        connections = case.concurrency or OPEN_CONNECTIONS
        spec = LoadSpec(case.protocol, target, str(self._messages(case)), connections, text=text)
        generators = min(self.part.generators, connections)
        with Generator(spec, generators) as generator, Sampler(self.server.process.pid) as sampler:
            window, enough = self._window(case)
            outcomes = generator.run_until(window, enough)
        is_counted = self.part.benchmark_requests is not None  # then all windows count, else the last three
        found = Measured.of(outcomes, thirds_agree(outcomes)) if is_counted else measured(outcomes)
        if not sum(outcome.answered for outcome in found.windows):
            raise NothingAnswered(found.rejected)
        first_s = HEAD_START_S + window.warm_up_s + (len(outcomes) - len(found.windows)) * window.seconds
        last_s = first_s + len(found.windows) * window.seconds
        inside = [sample for sample in sampler.samples if first_s <= sample.at_s <= last_s] or sampler.samples
        latencies = found.latencies
        generation = _generation(found, bool(self.part.goodput))
        return Repeat(
            number=number,
            requests_per_s=found.rps,
            items_per_s=found.rps * case.batch_size if generation is None else generation.tokens_per_s,
            answered=len(latencies),
            latency_ms=latencies.summary_ms(),
            latency_histogram=latencies.encode(),
            rejected=found.rejected,
            is_steady=found.is_steady,
            windows_per_s=[round(outcome.rps, 2) for outcome in outcomes],
            measured_s=sum(outcome.seconds for outcome in found.windows),
            cpu_percent=mean_cpu(inside),
            memory_mib=peak_mib(inside),
            generator_cpu_share=found.cpu_share,
            samples=sampler.samples,
            generation=generation,
        )

    def _window(self, case: Case) -> tuple[Window, Callable[[Sequence[WindowOutcome]], bool]]:
        part = self.part
        wanted = part.benchmark_requests
        if wanted is None:
            return Window(part.window_s, case.concurrency, case.rate, part.warm_up_s, part.most_windows), is_enough
        seconds = min(part.window_s, COUNTED_WINDOW_S)
        window = Window(seconds, case.concurrency, case.rate, part.warm_up_s, int(MOST_COUNTED_S / seconds))
        return window, lambda outcomes: has_answers(outcomes, wanted)

    def _messages(self, case: Case) -> Path:
        keys = {"model", "protocol", "data", "batch_size", *SHAPE_KEYS}
        file = self.folder / f"{case.model}-{digest(case.model_dump(include=keys))}.requests"
        if file.exists():
            return file
        if case.is_text:
            shape = GenerationShape(case.prompt_tokens, case.output_tokens, case.prefix_tokens)
            prompts = build_prompts(case.model, shape)
            return write_messages(file, encode_prompts(prompts, case.protocol, case.stream))
        payloads = build(case.data, case.model, case.batch_size, self.msmarco)
        return write_messages(file, encode(payloads, case.protocol))


def _generation(found: Measured, has_bounds: bool) -> TextRepeat | None:
    tokens = found.tokens
    if tokens is None:
        return None
    answered = sum(window.answered for window in found.windows)
    return TextRepeat(**summarize(tokens, answered, found.seconds, has_bounds))


def has_answers(outcomes: Sequence[WindowOutcome], wanted: int) -> bool:
    """Whether enough were answered, or none will be."""
    return is_hopeless(outcomes) or sum(outcome.answered for outcome in outcomes) >= wanted


def thirds_agree(outcomes: Sequence[WindowOutcome]) -> bool:
    """A counted run is steady when its three thirds are as three windows must be."""
    size = len(outcomes) // AGREEING
    thirds = (outcomes[start * size : (start + 1) * size] for start in range(AGREEING))
    return bool(size) and agree([Measured.of(third, False) for third in thirds])
