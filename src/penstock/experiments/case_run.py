"""Measure an experiment's case on a running server: throughput, latency, CPU, memory and accuracy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.client import Client
from penstock.core.tensors import BYTES, Tensor, from_array, pack_bytes, to_array
from penstock.experiments.experiment import SHAPE_KEYS, Case, ExperimentPart, digest
from penstock.experiments.load.generator import HEAD_START_S, Generator
from penstock.experiments.load.load_process import LoadSpec, TextSpec, Window, WindowOutcome, write_messages
from penstock.experiments.load.load_prompts import GenerationShape, build_prompts, encode_prompts
from penstock.experiments.load.loadtest import OPEN_CONNECTIONS
from penstock.experiments.load.payloads import build_built_in_payloads, encode
from penstock.experiments.load.steady import (
    AGREEING,
    Measured,
    NothingAnswered,
    do_windows_agree,
    has_enough_windows,
    is_refusing_all,
    measured,
)
from penstock.experiments.load.tokens import summarize
from penstock.experiments.processes import ServerRun
from penstock.experiments.results import Accuracy, Repeat, TextRepeat
from penstock.experiments.sampler import Sampler, compute_mean_cpu, compute_peak_mib
from penstock.experiments.variants import Variants
from penstock.models.convert.fidelity import answer_all, compare_answers
from penstock.models.loading import load_model
from penstock.models.samples.photos import photos
from penstock.models.samples.texts import mixed
from penstock.tasks.base import TaskRequest
from penstock.tasks.built_in import describe_task
from penstock.tasks.comparison import Answers

COUNTED_WINDOW_S = 0.5  # windows of a run that ends after a number of answers: shorter windows end the run sooner
MAX_COUNTED_S = 600.0

TEXTS = 64
PHOTOS = 3
SEED = 7


@dataclass(frozen=True, slots=True)
class CaseRun:
    """Measures an experiment's cases on a running server. `folder` stores files of requests, which cases share."""

    server: ServerRun
    folder: Path
    part: ExperimentPart
    msmarco: Path | None = None

    def measure(self, case: Case, number: int) -> Repeat:
        target = self.server.http if case.protocol == "rest" else self.server.grpc
        text = TextSpec(case.stream, self.part.bounds) if case.is_text else None
        connections = case.concurrency or OPEN_CONNECTIONS
        spec = LoadSpec(case.protocol, target, str(self._write_requests(case)), connections, text=text)
        generators = min(self.part.generators, connections)
        with Generator(spec, generators) as generator, Sampler(self.server.process.pid) as sampler:
            window, enough = self._plan_windows(case)
            outcomes = generator.run_until(window, enough)
        is_counted = self.part.benchmark_requests is not None  # True: all windows count; False: the last three
        found = Measured.of(outcomes, do_thirds_agree(outcomes)) if is_counted else measured(outcomes)
        if not sum(outcome.answered for outcome in found.windows):
            raise NothingAnswered(found.rejected)
        first_s = HEAD_START_S + window.warm_up_s + (len(outcomes) - len(found.windows)) * window.seconds
        last_s = first_s + len(found.windows) * window.seconds
        inside = [sample for sample in sampler.samples if first_s <= sample.at_s <= last_s] or sampler.samples
        latencies = found.latencies
        generation = _summarize_text(found, bool(self.part.goodput))
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
            cpu_percent=compute_mean_cpu(inside),
            memory_mib=compute_peak_mib(inside),
            generator_cpu_share=found.cpu_share,
            samples=sampler.samples,
            generation=generation,
        )

    def _plan_windows(self, case: Case) -> tuple[Window, Callable[[Sequence[WindowOutcome]], bool]]:
        part = self.part
        wanted = part.benchmark_requests
        if wanted is None:
            return Window(
                part.window_s, case.concurrency, case.rate, part.warm_up_s, part.most_windows
            ), has_enough_windows
        seconds = min(part.window_s, COUNTED_WINDOW_S)
        window = Window(seconds, case.concurrency, case.rate, part.warm_up_s, int(MAX_COUNTED_S / seconds))
        return window, lambda outcomes: has_enough_answers(outcomes, wanted)

    def _write_requests(self, case: Case) -> Path:
        keys = {"model", "protocol", "data", "batch_size", *SHAPE_KEYS}
        file = self.folder / f"{case.model}-{digest(case.model_dump(include=keys))}.requests"
        if file.exists():
            return file
        if case.is_text:
            shape = GenerationShape(case.prompt_tokens, case.output_tokens, case.prefix_tokens)
            prompts = build_prompts(case.model, shape)
            return write_messages(file, encode_prompts(prompts, case.protocol, case.stream))
        payloads = build_built_in_payloads(case.data, case.model, case.batch_size, self.msmarco)
        return write_messages(file, encode(payloads, case.protocol))


def _summarize_text(measured_load: Measured, has_bounds: bool) -> TextRepeat | None:
    tokens = measured_load.tokens
    if tokens is None:
        return None
    answered = sum(window.answered for window in measured_load.windows)
    return TextRepeat(**summarize(tokens, answered, measured_load.seconds, has_bounds))


def has_enough_answers(outcomes: Sequence[WindowOutcome], wanted: int) -> bool:
    """Return True if `wanted` requests were answered, or if waiting is useless: the server refuses every request."""
    return is_refusing_all(outcomes) or sum(outcome.answered for outcome in outcomes) >= wanted


def do_thirds_agree(outcomes: Sequence[WindowOutcome]) -> bool:
    """Return True if the three thirds of a run have similar throughput and latency, so that the run is steady."""
    size = len(outcomes) // AGREEING
    thirds = (outcomes[start * size : (start + 1) * size] for start in range(AGREEING))
    return bool(size) and do_windows_agree([Measured.of(third, False) for third in thirds])


class ServedAccuracy:
    """Compares served answers with FP32 answers. Computes the FP32 answers once per model, in this process."""

    def __init__(self, variants: Variants) -> None:
        self._variants = variants
        self._expected: dict[str, tuple[list[TaskRequest], Answers]] = {}  # by model

    def compare(self, model: str, address: str) -> Accuracy | None:
        """Return the accuracy of a served model, or None if the model's task defines no measure."""
        task = self._variants.folder(model).settings.task
        spread = describe_task(task).comparison.spread
        if spread is None:
            return None
        if model not in self._expected:
            with load_model(self._variants.original(model)) as original:
                requests = _to_requests([spec.name for spec in original.task.signature.inputs])
                self._expected[model] = requests, answer_all(original, [requests])
        requests, expected = self._expected[model]
        with Client(address) as client:
            served = [_infer(client, model, request) for request in requests]
        found = compare_answers(task, expected, [served])
        mean, lowest = (round(found.details[spread.key][name], spread.digits) for name in ("mean", "min"))
        samples = sum(request.inputs[0].shape[0] for request in requests)
        return Accuracy(measure=spread.label, mean=mean, lowest=lowest, samples=samples)


def _to_requests(inputs: list[str]) -> list[TaskRequest]:
    if inputs == ["text"]:
        return [TaskRequest([Tensor("text", BYTES, (TEXTS,), pack_bytes(mixed(TEXTS, SEED)))], [])]
    return [TaskRequest([Tensor("image", BYTES, (1, 1), pack_bytes([photo]))], []) for photo in photos()[:PHOTOS]]


def _infer(client: Client, model: str, request: TaskRequest) -> list[Tensor]:
    inputs = {tensor.name: to_array(tensor) for tensor in request.inputs}
    return [from_array(name, array) for name, array in client.infer(model, inputs).items()]
