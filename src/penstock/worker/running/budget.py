"""How much a block's instances take: jobs that may wait for them, and levels whose requests may wait longer."""

from penstock.core.settings import Batching, BlockSettings, Priorities

# What waits is never joined: the first piece fills a batch, whatever its rows.
ALONE = Batching(max_rows=1)


def credits_of(settings: BlockSettings, instances: int) -> int:
    """Twice what the instances can hold: enough for like lengths to meet, the rest waits where it can go elsewhere."""
    return 2 * instances * settings.batching.max_rows


def delaying_levels(priorities: Priorities) -> frozenset[int]:
    """The levels whose requests are delayed when they have waited for too long; the others' are rejected."""
    levels = range(1, priorities.levels + 1)
    return frozenset(level for level in levels if priorities.policy(level).on_timeout == "delay")
