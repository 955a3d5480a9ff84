"""What a block that generates text counts while it runs: its engine's standing, and how fast tokens come."""

import time
from dataclasses import dataclass, field, replace

from penstock.core.blocks import BlockDescription
from penstock.core.generation import Delta, GenerationStanding, Progress
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.tally import CounterTally
from penstock.worker.running.counts import BlockCounts

# Of a standing, by the names of their metrics.
GROWING = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions")


@dataclass(slots=True)
class ChoicePace:
    """When a choice's tokens came."""

    tokens: int = 0
    first: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class TokenPace:
    """When a generation's tokens came. Its owner makes one as the generation arrives, and keeps it."""

    arrived: float
    is_first_due: bool = True
    choices: dict[int, ChoicePace] = field(default_factory=dict)


class GenerationCounts(BlockCounts):
    """Tokens are counted by what the engine tells with each step: once, whether their answers are streamed or not."""

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
        self._standing = GenerationStanding()  # as the engine told it last
        self._stepped_at = 0.0  # when that was
        self.statistics.generation = GenerationStanding()

    def stepped(self, standing: GenerationStanding, now: float, waiting: int = 0) -> None:
        """With what the engine tells of its steps; `waiting` are the generations that it has not been given yet."""
        total, before = self.statistics.generation, self._standing
        assert total is not None
        if standing.steps < before.steps:
            before = GenerationStanding()  # the engine has begun anew: all that it counts is new
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
            if before.running + before.waiting:  # else it rested meanwhile
                self._compute_seconds.observe((now - self._stepped_at) / steps, steps)
        self._stepped_at = now
        total.running, total.waiting = standing.running, standing.waiting + waiting
        total.cache_blocks, total.cache_blocks_used = standing.cache_blocks, standing.cache_blocks_used
        self._standing = replace(standing)

    def heard(self, pace: TokenPace, progress: Progress, now: float) -> None:
        """What a generation has got in a step."""
        if progress.prompt_tokens:
            self._prompt.observe(progress.prompt_tokens)
        for delta in progress.deltas:
            self._heard(pace, delta, now)
        if progress.is_over:
            self.statistics.inference_count += 1

    def _heard(self, pace: TokenPace, delta: Delta, now: float) -> None:
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
            self._ended(choice, delta.finish_reason)

    def _ended(self, choice: ChoicePace, reason: str) -> None:
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
        """The engine is gone, and all that it was doing with it."""
        self.statistics.depart()
        self.flush()
