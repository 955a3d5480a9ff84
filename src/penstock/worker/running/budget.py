"""How much one batch may hold, and how it may be filled."""

from dataclasses import dataclass

from penstock.core.settings import BlockSettings, Priorities

# A batch's budget of tokens never shrinks below this part of it.
LEAST_PART = 4


@dataclass(frozen=True, slots=True)
class Budget:
    max_rows: int
    max_tokens: int | None = None
    max_padding: float = 0.05
    free_padding: int = 0
    max_delay_s: float = 0.0
    by_length: bool = True
    reach_tokens: int | None = None  # how far down the line a batch looks for its like; None: to its end
    share: float = 1.0  # of the waiting tokens that one batch takes at most, while they are few

    def tokens_now(self, waiting: int) -> int | None:
        """What waits is shared out, so that the next instance finds work, too; but batches stay worth their cost."""
        if self.max_tokens is None:
            return None
        return min(self.max_tokens, max(self.max_tokens // LEAST_PART, int(waiting * self.share)))


# What waits is never joined: the first piece fills a batch, whatever its rows.
ALONE = Budget(max_rows=1)


def budget_of(settings: BlockSettings, instances: int) -> Budget:
    batching = settings.batching
    return Budget(
        max_rows=batching.max_rows,
        max_tokens=batching.max_tokens,
        max_padding=batching.max_padding,
        free_padding=batching.free_padding,
        max_delay_s=batching.max_delay_ms / 1000,
        by_length=batching.order == "length",
        reach_tokens=batching.reach_tokens,
        share=1 / (2 * instances),
    )


def credits_of(settings: BlockSettings, instances: int) -> int:
    """Twice what the instances can hold: enough for like lengths to meet, the rest waits where it can go elsewhere."""
    return 2 * instances * settings.batching.max_rows


def delaying_levels(priorities: Priorities) -> frozenset[int]:
    """The levels whose requests are delayed when they have waited for too long; the others' are rejected."""
    levels = range(1, priorities.levels + 1)
    return frozenset(level for level in levels if priorities.policy(level).on_timeout == "delay")
