"""Counts of generated text: each token once, times by choice, and a restarted engine."""

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.blocks import BlockDescription
from penstock.core.generation import Delta, GenerationState, Progress
from penstock.core.settings import BlockSettings
from penstock.telemetry.metrics import WorkerMetrics
from penstock.worker.running.generation_counts import GenerationCounts, TokenPace


class Bed:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        block = BlockDescription("blk-1", "m", "1", "genai", "fp32", (), (), 0, 1, BlockSettings(task="generate"))
        self.counts = GenerationCounts(WorkerMetrics(self.registry), block)

    def sample(self, name: str, **labels: str) -> float | None:
        self.counts.flush()
        return self.registry.get_sample_value(f"penstock_{name}", {"model": "m", "version": "1", **labels})


@pytest.fixture
def bed() -> Bed:
    return Bed()


def progress(*deltas: tuple[int, int, str], prompt: int = 0, is_over: bool = False) -> Progress:
    """Return a step; each delta has its choice, its number of tokens, and the reason of its end."""
    made = [Delta(choice, "x" * tokens, list(range(tokens)), (), reason) for choice, tokens, reason in deltas]
    return Progress(1, made, prompt_tokens=prompt, is_over=is_over)


def test_the_first_token_is_timed_from_the_arrival_and_the_others_from_the_one_before(bed: Bed) -> None:
    pace = TokenPace(arrived=10.0)
    bed.counts.count(pace, progress((0, 1, ""), prompt=7), 10.5)
    bed.counts.count(pace, progress((0, 1, "")), 10.6)
    bed.counts.count(pace, progress((0, 2, "stop"), is_over=True), 11.0)
    assert bed.sample("engine_time_to_first_token_seconds_count") == 1
    assert bed.sample("engine_time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert bed.sample("engine_time_between_tokens_seconds_count") == 3
    assert bed.sample("engine_time_between_tokens_seconds_sum") == pytest.approx(0.5)
    assert bed.sample("engine_time_between_tokens_seconds_bucket", le="0.3") == 3
    assert bed.sample("engine_time_between_tokens_seconds_bucket", le="0.15") == 1
    assert bed.sample("request_prompt_tokens_sum") == 7
    assert bed.sample("request_generated_tokens_sum") == 4
    assert bed.sample("request_tokens_per_second_sum") == pytest.approx(3 / 0.5)
    assert bed.sample("generated_answers_total", finish="stop") == 1
    assert bed.counts.statistics.inference_count == 1


def test_choices_are_timed_separately(bed: Bed) -> None:
    pace = TokenPace(arrived=0.0)
    bed.counts.count(pace, progress((0, 1, ""), (1, 1, "")), 1.0)
    bed.counts.count(pace, progress((0, 1, "length"), (1, 1, "stop"), is_over=True), 1.25)
    assert bed.sample("engine_time_to_first_token_seconds_count") == 1
    assert bed.sample("engine_time_between_tokens_seconds_count") == 2
    assert bed.sample("engine_time_between_tokens_seconds_sum") == pytest.approx(0.5)
    assert [bed.sample("generated_answers_total", finish=finish) for finish in ("stop", "length")] == [1, 1]


def test_tokens_are_counted_as_the_engine_reports_them_even_after_a_restart(bed: Bed) -> None:
    bed.counts.count_step(GenerationState(2, 1, 100, 30, 5, 40, 8, 9, 1), 1.0, waiting=3)
    bed.counts.count_step(GenerationState(3, 0, 100, 35, 6, 50, 10, 12, 1), 1.5)
    bed.counts.count_step(
        GenerationState(1, 0, 100, 5, 1, 20, 0, 1, 0), 9.0
    )  # its process ended, and there is a new one
    assert bed.sample("prompt_tokens_total") == 70
    assert bed.sample("prefix_hit_tokens_total") == 10
    assert bed.sample("generated_tokens_total") == 13
    assert bed.sample("preemptions_total") == 1
    assert bed.sample("generation_steps_total") == 7
    assert bed.sample("kv_cache_blocks", kind="used") == 5
    assert bed.sample("kv_cache_blocks", kind="all") == 100
    assert bed.counts.statistics.generation == GenerationState(1, 0, 100, 5, 7, 70, 10, 13, 1)


def test_requests_waiting_in_the_worker_count_and_an_ended_engine_has_none(bed: Bed) -> None:
    bed.counts.count_step(
        GenerationState(running=2, waiting=1, cache_blocks=9, steps=1, generated_tokens=4), 1.0, waiting=3
    )
    assert bed.sample("generations", state="running") == 2
    assert bed.sample("generations", state="waiting") == 4
    assert bed.counts.statistics.generation is not None
    assert bed.counts.statistics.generation.cached_tokens == -1  # not reported
    bed.counts.stop()
    assert [bed.sample("generations", state=state) for state in ("running", "waiting")] == [0, 0]
    assert bed.sample("kv_cache_blocks", kind="all") == 0
    assert bed.sample("generated_tokens_total") == 4


def test_a_steps_time_starts_at_the_step_before_if_there_was_work(bed: Bed) -> None:
    for steps, running, at in ((1, 2, 10.0), (3, 2, 10.5), (4, 0, 10.75), (5, 1, 60.0)):
        bed.counts.count_step(GenerationState(running=running, steps=steps), at)
    assert bed.sample("compute_seconds_count") == 3
    assert bed.sample("compute_seconds_sum") == pytest.approx(0.75)
    assert bed.counts.statistics.execution_count == 5
