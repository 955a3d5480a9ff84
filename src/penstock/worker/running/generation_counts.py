"""Counts a generating block's work: its engine's steps, and the times at which tokens arrive."""

import time
from dataclasses import dataclass, field, replace

from penstock.core.blocks import BlockDescription
from penstock.core.generation import Delta, GenerationState, Progress
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.tally import CounterTally
from penstock.worker.running.counts import BlockCounts

# Fields of GenerationState that only grow; metrics have the same names.
COUNTER_FIELDS = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions")


@dataclass(slots=True)
class ChoicePace:
    """The number of tokens of a choice (one answer), and the arrival times of its first and its last token."""

    tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0


@dataclass(slots=True)
class TokenPace:
    """The arrival times of a generation and of the tokens of its choices (alternative answers)."""

    arrived: float
    is_first_due: bool = True
    choices: dict[int, ChoicePace] = field(default_factory=dict)


class GenerationCounts(BlockCounts):
    """Counts a generating block's work. Tokens are counted as they are generated, even if answers are not streamed."""

    def __init__(self, metrics: WorkerMetrics, block: BlockDescription) -> None:
        super().__init__(metrics, block)
        of, labels, tallies = metrics.generation, self._labels, self._tallies
        self._first_token = tallies.add_histogram(of.first_token_seconds.labels(*labels))
        self._between_tokens = tallies.add_histogram(of.between_tokens_seconds.labels(*labels))
        self._prompt = tallies.add_histogram(of.request_prompt_tokens.labels(*labels))
        self._generated = tallies.add_histogram(of.request_generated_tokens.labels(*labels))
        self._tokens_per_s = tallies.add_histogram(of.request_tokens_per_s.labels(*labels))
        self._engine_counters = {
            name: tallies.add_counter(getattr(of, name).labels(*labels)) for name in COUNTER_FIELDS
        }
        self._finished: dict[str, CounterTally] = {}
        self._last_state = GenerationState()  # the engine's last report
        self._stepped_at = 0.0  # time of the engine's last report
        self.statistics.generation = GenerationState()

    def count_step(self, state: GenerationState, now: float, waiting: int = 0) -> None:
        """Count the engine's work in a step; `waiting`: the number of generations not yet passed to the engine."""
        total, before = self.statistics.generation, self._last_state
        assert total is not None
        if state.steps < before.steps:
            before = GenerationState()  # the engine has restarted and counts from zero
        for name, tally in self._engine_counters.items():
            grown = max(0, getattr(state, name)) - max(0, getattr(before, name))
            if grown > 0:
                tally.inc(grown)
                setattr(total, name, max(0, getattr(total, name)) + grown)
        if state.cached_tokens >= 0 > total.cached_tokens:
            total.cached_tokens = 0
        if (steps := state.steps - before.steps) > 0:
            self.statistics.execution_count += steps
            self.statistics.last_inference_ms = int(time.time() * 1000)
            if before.running + before.waiting:  # otherwise the engine was idle
                self._compute_seconds.observe((now - self._stepped_at) / steps, steps)
        self._stepped_at = now
        total.running, total.waiting = state.running, state.waiting + waiting
        total.cache_blocks, total.cache_blocks_used = state.cache_blocks, state.cache_blocks_used
        self._last_state = replace(state)

    def count(self, pace: TokenPace, progress: Progress, now: float) -> None:
        """Count a generation's progress in one step."""
        if progress.prompt_tokens:
            self._prompt.observe(progress.prompt_tokens)
        for delta in progress.deltas:
            self._count_tokens(pace, delta, now)
        if progress.is_over:
            self.statistics.inference_count += 1

    def _count_tokens(self, pace: TokenPace, delta: Delta, now: float) -> None:
        choice = pace.choices.setdefault(delta.choice, ChoicePace())
        if new := len(delta.token_ids):
            if pace.is_first_due:
                pace.is_first_due = False
                self._first_token.observe(now - pace.arrived)
            if choice.tokens:
                self._between_tokens.observe((now - choice.last_at) / new, new)
            else:
                choice.first_at = now
            choice.tokens += new
            choice.last_at = now
        if delta.finish_reason:
            self._count_choice(choice, delta.finish_reason)

    def _count_choice(self, choice: ChoicePace, reason: str) -> None:
        tally = self._finished.get(reason)
        if tally is None:
            counter = self._all.generation.finished.labels(*self._labels, reason)
            tally = self._finished[reason] = self._tallies.add_counter(counter)
        tally.inc()
        self._generated.observe(choice.tokens)
        if choice.last_at > choice.first_at:
            self._tokens_per_s.observe((choice.tokens - 1) / (choice.last_at - choice.first_at))

    def flush(self) -> None:
        super().flush()
        state, of, labels = self.statistics.generation, self._all.generation, self._labels
        assert state is not None
        of.generations.labels(*labels, "running").set(state.running)
        of.generations.labels(*labels, "waiting").set(state.waiting)
        of.cache_blocks.labels(*labels, "used").set(state.cache_blocks_used)
        of.cache_blocks.labels(*labels, "all").set(state.cache_blocks)

    def stop(self) -> None:
        """Clear the current state, because the engine has ended."""
        self.statistics.clear_current()
        self.flush()
