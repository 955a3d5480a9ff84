"""Makes results of an experiment from numbers that a test chooses."""

from collections.abc import Mapping, Sequence

from penstock.experiments.experiment import Case, Experiment, expand
from penstock.experiments.load.latencies import Latencies
from penstock.experiments.results import Accuracy, CaseResult, Repeat, Results, TextRepeat
from penstock.experiments.sampler import UsageSample

HISTOGRAM = Latencies([0.01] * 20).encode()
# Without MPS and without a PyTorch engine, none of these cases can run.
AS_IN_THE_SEED = """
name: "my_experiment"
description: "Description of the experiment"

model:
  name: "sentence-transformers/all-MiniLM-L6-v2"
  device: "mps"
  quantized: false
  backend: "pytorch"

# Optional: override experiment parameters
experiment:
  batch_sizes: [1, 4, 8]
  benchmark_requests: 100
"""


def make_cases(**sections: object) -> list[Case]:
    experiment = Experiment.model_validate({"name": "made", **sections})
    return expand(experiment, lambda model: "onnx")


def make_repeat(number: int, rps: float, p99_ms: float, batch_size: int = 1, is_steady: bool = True) -> Repeat:
    return Repeat(
        number=number,
        requests_per_s=rps,
        items_per_s=rps * batch_size,
        answered=20,
        latency_ms=dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "p99.9", "max"), p99_ms),
        latency_histogram=HISTOGRAM,
        rejected={},
        is_steady=is_steady,
        windows_per_s=[rps] * 3,
        measured_s=3.0,
        cpu_percent={"gateway": 10.0, "worker": 90.0},
        memory_mib={"gateway": 90.0, "worker": 250.0},
        generator_cpu_share=0.1,
        samples=[UsageSample(0.25 * step, 10.0, 90.0, 90.0, 250.0) for step in range(1, 5)],
    )


def make_text(tokens_per_s: float, first_ms: float, between_ms: float) -> TextRepeat:
    percentiles = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
    return TextRepeat(
        tokens_per_s=tokens_per_s,
        prompt_tokens_per_s=2 * tokens_per_s,
        request_tokens_per_s={"p50": 1000 / between_ms, "p10": 500 / between_ms, "p1": 100 / between_ms},
        prompt_tokens_mean=128.0,
        output_tokens_mean=64.0,
        first_token_ms=dict.fromkeys(percentiles, first_ms),
        between_tokens_ms=dict.fromkeys(percentiles, between_ms),
        token_ms=None,
        goodput_per_s=1.5,
        first_token_histogram=Latencies([first_ms / 1000] * 20).encode(),
        between_tokens_histogram=Latencies([between_ms / 1000] * 20).encode(),
    )


def make_results(
    rps: Mapping[str, Sequence[float]],
    p99_ms: Mapping[str, Sequence[float]] | None = None,
    cases: Sequence[Case] | None = None,
    machine: str = "a processor",
) -> Results:
    """Return results; `rps` and `p99_ms` map a case id to a number for each repeat, and other cases are not run."""
    found = []
    for case in cases or make_cases(experiment={"concurrency_levels": [1, 8]}):
        numbers = rps.get(case.id, ())
        tails = (p99_ms or {}).get(case.id, [10.0] * len(numbers))
        repeats = [
            make_repeat(index, rate, tail, case.batch_size)
            for index, (rate, tail) in enumerate(zip(numbers, tails, strict=True), 1)
        ]
        accuracy = Accuracy(measure="cosine", mean=0.9914, lowest=0.9775, samples=64) if repeats else None
        why = "" if repeats else "the installed ONNX Runtime has no CUDAExecutionProvider"
        found.append(CaseResult(case=case, unit=case.unit, not_run=why, accuracy=accuracy, repeats=repeats))
    return Results(
        experiment="made",
        description="Numbers <b>that</b> a test chose",
        settings={"model": {"name": "minilm"}, "experiment": {"window_s": 3.0}},
        settings_hash="0123456789abcdef",
        machine={"processor": machine, "cores": "2", "memory": "8.0 GiB", "penstock": "0.1.0"},
        started="2026-01-01T00:00:00+00:00",
        updated="2026-01-01T00:10:00+00:00",
        cases=found,
    )
