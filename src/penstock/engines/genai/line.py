"""Which generations join between two steps: by priority and arrival, as far as the cache and a step have room.

Decides; knows neither the engine nor time. Tokens lie in the cache in blocks; what a group's sequences share of them
is counted once.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.core.errors import RequestTooLarge


@dataclass(frozen=True, slots=True)
class LineLimits:
    blocks: int  # of the cache
    block_tokens: int
    max_running: int  # sequences at once
    max_batched_tokens: int  # that one step computes


@dataclass(order=True, slots=True)
class Group:
    """A generation's sequences, one for each choice, with the prompt that they share."""

    priority: int  # 1 is the highest
    arrival: int
    number: int = field(compare=False)
    prompt_tokens: int = field(compare=False)
    sequences: int = field(compare=False, default=1)
    generated: int = field(compare=False, default=0)  # by each sequence, at most
    is_prompt_done: bool = field(compare=False, default=False)


class GenerationLine:
    def __init__(self, limits: LineLimits) -> None:
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
        return sum(self._blocks(group, group.generated) for group in self._running.values())

    def most_tokens(self, prompt_tokens: int, asked: int | None, sequences: int) -> int:
        """What each sequence may have: as asked, or else as many as fit. Raises RequestTooLarge where not even alone it
        would fit."""
        limits = self._limits
        if sequences > limits.max_running:
            raise RequestTooLarge(
                f"n is {sequences}, and at most {limits.max_running} sequences are generated at once "
                "(generate.max_running): ask for fewer"
            )
        most = self._room_alone(prompt_tokens, sequences)
        if most < (asked or 1):
            raise RequestTooLarge(
                f"{_told(prompt_tokens, asked, sequences)} do not fit into the cache, which has room for "
                f"{limits.blocks * limits.block_tokens} tokens (genai.cache_mb): send less, or ask for fewer"
            )
        return asked or most

    def append(self, number: int, priority: int, prompt_tokens: int, sequences: int = 1) -> None:
        self._arrivals += 1
        insort(self._waiting, Group(priority, self._arrivals, number, prompt_tokens, sequences))

    def join(self) -> list[Group]:
        """Those that are to join now. Nobody overtakes one that is before it and has no room yet."""
        joined = []
        while self._waiting and self._has_room(self._waiting[0]):
            group = self._waiting.pop(0)
            self._running[group.number] = group
            joined.append(group)
        return joined

    def advance(self, number: int, generated: int) -> None:
        """It has so many tokens: its prompt is done."""
        group = self._running[number]
        group.is_prompt_done = True
        group.generated = generated

    def remove(self, number: int) -> bool:
        """It is over, or nobody wants it any more. Returns whether it had joined."""
        if self._running.pop(number, None) is not None:
            return True
        self._waiting = [group for group in self._waiting if group.number != number]
        return False

    def _has_room(self, group: Group) -> bool:
        limits = self._limits
        if not self._running:
            return True  # it fits alone, as it was taken
        running = self.running_sequences
        if running + group.sequences > min(limits.max_running, limits.max_batched_tokens):
            return False
        # What is computed before it would join all the same is decided then: somebody more urgent may have come.
        if sum(each.prompt_tokens for each in self._running.values() if not each.is_prompt_done) >= (
            limits.max_batched_tokens
        ):
            return False
        # A block more for each sequence: that nothing which has begun is thrown out of the cache at once.
        wanted = self._blocks(group, 0) + group.sequences + running
        return self.blocks_used + wanted <= limits.blocks

    def _blocks(self, group: Group, generated: int) -> int:
        """The prompt's whole blocks are shared; of the last one each sequence has its own."""
        size = self._limits.block_tokens
        shared, rest = divmod(group.prompt_tokens, size)
        return shared + group.sequences * -(-(rest + generated) // size)

    def _room_alone(self, prompt_tokens: int, sequences: int) -> int:
        """What each sequence can have if nobody else is there; negative: not even the prompt fits."""
        size = self._limits.block_tokens
        shared, rest = divmod(prompt_tokens, size)
        return (self._limits.blocks - shared) // sequences * size - rest


def _told(prompt_tokens: int, max_tokens: int | None, sequences: int) -> str:
    answers = f" and {sequences} answers" if sequences > 1 else " and an answer"
    of = f" of {max_tokens} tokens" if max_tokens is not None else ""
    return f"a prompt of {prompt_tokens} tokens{answers}{of}"
