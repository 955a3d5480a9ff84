"""Counts a generating block's work: its engine's steps, and the times at which tokens arrive."""

import time
from dataclasses import dataclass, field, replace

from penstock.core.blocks import BlockDescription
from penstock.core.generation import Delta, GenerationState, Progress
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.tally import CounterTally
from penstock.worker.running.counts import BlockCounts

# Fields of GenerationState that only grow; metrics have the same names.
GROWING = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions")


@dataclass(slots=True)
class ChoicePace:
    """The number of a choice's tokens, and the times at which its first and its last token arrived."""

    tokens: int = 0
    first: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class TokenPace:
    """The times at which a generation and the tokens of its choices arrived."""

    arrived: float
    is_first_due: bool = True
    choices: dict[int, ChoicePace] = field(default_factory=dict)


class GenerationCounts(BlockCounts):
    """Counts a generating block's work. Tokens are counted per step, even if the answer is not streamed."""

    def __init__(self, metrics: WorkerMetrics, block: BlockDescription) -> None:
        super().__init__(metrics, block)
        of, labels, tallies = metrics.generation, self._labels, self._tallies
        self._first_token = tallies.histogram(of.first_token_seconds.labels(*labels))
        self._between_tokens = tallies.histogram(of.between_tokens_seconds.labels(*labels))
        self._prompt = tallies.histogram(of.request_prompt_tokens.labels(*labels))
        self._generated = tallies.histogram(of.request_generated_tokens.labels(*labels))
        self._tokens_per_s = tallies.histogram(of.request_tokens_per_s.labels(*labels))
        self._growing = {name: tallies.counter(getattr(of, name).labels(*labels)) for name in GROWING}
        self._finished: dict[str, CounterTally] = {}
        self._standing = GenerationState()  # the engine's last report
        self._stepped_at = 0.0  # time of the engine's last report
        self.statistics.generation = GenerationState()

    def count_step(self, standing: GenerationState, now: float, waiting: int = 0) -> None:
        """Count the engine's work in a step; `waiting`: the generations that were not passed to the engine yet."""
        total, before = self.statistics.generation, self._standing
        assert total is not None
        if standing.steps < before.steps:
            before = GenerationState()  # the engine has restarted and counts from zero
        for name, tally in self._growing.items():
            grown = max(0, getattr(standing, name)) - max(0, getattr(before, name))
            if grown > 0:
                tally.inc(grown)
                setattr(total, name, max(0, getattr(total, name)) + grown)
        if standing.cached_tokens >= 0 > total.cached_tokens:
            total.cached_tokens = 0
        if (steps := standing.steps - before.steps) > 0:
            self.statistics.execution_count += steps
            self.statistics.last_inference_ms = int(time.time() * 1000)
            if before.running + before.waiting:  # otherwise the engine was idle
                self._compute_seconds.observe((now - self._stepped_at) / steps, steps)
        self._stepped_at = now
        total.running, total.waiting = standing.running, standing.waiting + waiting
        total.cache_blocks, total.cache_blocks_used = standing.cache_blocks, standing.cache_blocks_used
        self._standing = replace(standing)

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
                self._between_tokens.observe((now - choice.last) / new, new)
            else:
                choice.first = now
            choice.tokens += new
            choice.last = now
        if delta.finish_reason:
            self._count_choice(choice, delta.finish_reason)

    def _count_choice(self, choice: ChoicePace, reason: str) -> None:
        tally = self._finished.get(reason)
        if tally is None:
            counter = self._all.generation.finished.labels(*self._labels, reason)
            tally = self._finished[reason] = self._tallies.counter(counter)
        tally.inc()
        self._generated.observe(choice.tokens)
        if choice.last > choice.first:
            self._tokens_per_s.observe((choice.tokens - 1) / (choice.last - choice.first))

    def flush(self) -> None:
        super().flush()
        standing, of, labels = self.statistics.generation, self._all.generation, self._labels
        assert standing is not None
        of.generations.labels(*labels, "running").set(standing.running)
        of.generations.labels(*labels, "waiting").set(standing.waiting)
        of.cache_blocks.labels(*labels, "used").set(standing.cache_blocks_used)
        of.cache_blocks.labels(*labels, "all").set(standing.cache_blocks)

    def stop(self) -> None:
        """Clear the current state, because the engine has ended."""
        self.statistics.clear_current()
        self.flush()
