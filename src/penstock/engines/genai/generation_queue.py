"""Decides which waiting generations join the batch between two steps: by priority and arrival, if there is room.

This module uses neither the engine nor a clock. The cache stores tokens in blocks; blocks that the sequences of a group
share are counted once.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.core.errors import RequestTooLarge


@dataclass(frozen=True, slots=True)
class QueueLimits:
    blocks: int  # in the cache
    block_tokens: int
    max_running: int  # sequences that run at once
    max_batched_tokens: int  # tokens that one step computes


@dataclass(order=True, slots=True)
class Group:
    """The sequences of one generation, which share its prompt."""

    priority: int  # 1 is the highest
    arrival: int
    number: int = field(compare=False)
    prompt_tokens: int = field(compare=False)
    sequences: int = field(compare=False, default=1)
    generated: int = field(compare=False, default=0)  # most tokens that one of its sequences has
    is_prompt_done: bool = field(compare=False, default=False)


class GenerationQueue:
    """Decides which waiting groups start, and counts the blocks of the KV cache that running groups need."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._waiting: list[Group] = []  # in the order in which they join
        self._running: dict[int, Group] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def running_sequences(self) -> int:
        return sum(group.sequences for group in self._running.values())

    @property
    def running(self) -> Iterator[int]:
        return iter(self._running)

    @property
    def blocks_used(self) -> int:
        return sum(self._count_blocks(group, group.generated) for group in self._running.values())

    def most_tokens(self, prompt_tokens: int, requested: int | None, sequences: int) -> int:
        """Return the most tokens that each sequence may generate: the requested number, or as many as fit the cache.

        Raises RequestTooLarge if the generation would not fit even if no other one runs.
        """
        limits = self._limits
        if sequences > limits.max_running:
            raise RequestTooLarge(
                f"n is {sequences}, but at most {limits.max_running} sequences run at once "
                "(generate.max_running): lower n"
            )
        most = self._most_tokens_alone(prompt_tokens, sequences)
        if most < (requested or 1):
            raise RequestTooLarge(
                f"{_describe_size(prompt_tokens, requested, sequences)} do not fit into the cache, which has room for "
                f"{limits.blocks * limits.block_tokens} tokens (genai.cache_mb): shorten the prompt, or lower "
                "max_tokens"
            )
        return requested or most

    def append(self, number: int, priority: int, prompt_tokens: int, sequences: int = 1) -> None:
        self._arrivals += 1
        insort(self._waiting, Group(priority, self._arrivals, number, prompt_tokens, sequences))

    def join(self) -> list[Group]:
        """Start the waiting groups for which there is room, in order; no group overtakes an earlier group."""
        joined = []
        while self._waiting and self._has_room(self._waiting[0]):
            group = self._waiting.pop(0)
            self._running[group.number] = group
            joined.append(group)
        return joined

    def advance(self, number: int, generated: int) -> None:
        """Record that a group's prompt is computed, and that its longest sequence has `generated` new tokens."""
        group = self._running[number]
        group.is_prompt_done = True
        group.generated = generated

    def remove(self, number: int) -> bool:
        """Remove a finished or cancelled group, and return whether it was running."""
        if self._running.pop(number, None) is not None:
            return True
        self._waiting = [group for group in self._waiting if group.number != number]
        return False

    def _has_room(self, group: Group) -> bool:
        limits = self._limits
        if not self._running:
            return True  # `most_tokens` has checked that the group fits alone
        running = self.running_sequences
        if running + group.sequences > min(limits.max_running, limits.max_batched_tokens):
            return False
        # Further prompts must wait for a later step, because a more urgent group may arrive until then.
        if sum(each.prompt_tokens for each in self._running.values() if not each.is_prompt_done) >= (
            limits.max_batched_tokens
        ):
            return False
        # Reserve one more block per sequence, so that no running sequence is preempted immediately.
        wanted = self._count_blocks(group, 0) + group.sequences + running
        return self.blocks_used + wanted <= limits.blocks

    def _count_blocks(self, group: Group, generated: int) -> int:
        """Count the blocks of a group.

        Its sequences share the full blocks of the prompt; each sequence has its own copy of all later blocks.
        """
        size = self._limits.block_tokens
        shared, rest = divmod(group.prompt_tokens, size)
        return shared + group.sequences * -(-(rest + generated) // size)

    def _most_tokens_alone(self, prompt_tokens: int, sequences: int) -> int:
        """Return how many tokens each sequence may have if no other group runs; negative if the prompt does not fit."""
        size = self._limits.block_tokens
        shared, rest = divmod(prompt_tokens, size)
        return (self._limits.blocks - shared) // sequences * size - rest


def _describe_size(prompt_tokens: int, max_tokens: int | None, sequences: int) -> str:
    answers = f" and {sequences} answers" if sequences > 1 else " and an answer"
    of = f" of {max_tokens} tokens" if max_tokens is not None else ""
    return f"a prompt of {prompt_tokens} tokens{answers}{of}"
