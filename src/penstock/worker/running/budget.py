"""Computes how many jobs may wait for a block, and which levels delay late requests."""

from penstock.core.settings import Batching, BlockSettings, Priorities

# Settings with which each piece is a batch of its own, whatever its number of rows.
ALONE = Batching(max_rows=1)


def credits_of(settings: BlockSettings, instances: int) -> int:
    """Return the block's credits, the jobs that all gateways together may send: twice the rows that run at once.

    So many are enough to batch jobs of similar length; further jobs wait in gateways, which can still reroute them.
    """
    return 2 * instances * settings.batching.max_rows


def delaying_levels(priorities: Priorities) -> frozenset[int]:
    """Return the priority levels that delay requests at their queue deadline; all other levels reject them."""
    levels = range(1, priorities.levels + 1)
    return frozenset(level for level in levels if priorities.policy(level).on_timeout == "delay")
