"""Statistics of a block since its worker started, in the terms of the protocol's ModelStatistics."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from penstock.core.generation import GenerationState

DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
BATCH_DURATIONS = DURATIONS[3:]


@dataclass(slots=True)
class Duration:
    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns

    def merge(self, other: "Duration") -> None:
        self.add(other.ns, other.count)


@dataclass(slots=True)
class BatchStatistics:
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def merge(self, other: "BatchStatistics") -> None:
        for name in BATCH_DURATIONS:
            getattr(self, name).merge(getattr(other, name))


@dataclass(slots=True)
class BlockStatistics:
    block_id: str
    model: str
    version: str
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    closed: dict[str, int] = field(default_factory=dict)
    generation: GenerationState | None = None  # of a block that generates text

    def merge(self, other: "BlockStatistics") -> None:
        self.last_inference_ms = max(self.last_inference_ms, other.last_inference_ms)
        self.inference_count += other.inference_count
        self.execution_count += other.execution_count
        for name in DURATIONS:
            getattr(self, name).merge(getattr(other, name))
        for rows, batch in other.batches.items():
            self.batches.setdefault(rows, BatchStatistics()).merge(batch)
        for reason, count in other.closed.items():
            self.closed[reason] = self.closed.get(reason, 0) + count
        if other.generation is not None:
            self.generation = add_states(self.generation or GenerationState(), other.generation)

    def clear_current(self) -> None:
        """Set the current values (running, waiting, cache use) of a worker that is gone to 0, and keep its counters."""
        if (state := self.generation) is not None:
            state.running = state.waiting = state.cache_blocks = state.cache_blocks_used = 0


def add_states(a: GenerationState, b: GenerationState) -> GenerationState:
    """Add the states of two engines. `cached_tokens` counts only the engines that report it."""
    both = {each.name: getattr(a, each.name) + getattr(b, each.name) for each in fields(GenerationState)}
    if min(a.cached_tokens, b.cached_tokens) < 0:
        both["cached_tokens"] = max(a.cached_tokens, b.cached_tokens)
    return GenerationState(**both)


def merge_by_block(statistics: Iterable[BlockStatistics]) -> list[BlockStatistics]:
    """Return the merged statistics of each block."""
    total: dict[str, BlockStatistics] = {}
    for one in statistics:
        total.setdefault(one.block_id, BlockStatistics(one.block_id, one.model, one.version)).merge(one)
    return list(total.values())
