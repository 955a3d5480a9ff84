"""Pairs of texts as a cross-encoder takes them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import ConfigError
from penstock.tasks.base import Piece
from penstock.tasks.network import IDS, TYPES
from penstock.tasks.text import TextTokenizer


@dataclass(frozen=True, slots=True)
class _Run:
    """Special tokens, and their types."""

    ids: list[int]
    types: list[int]


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Where the texts stand among the special tokens."""

    before: _Run
    between: _Run
    after: _Run
    text_types: tuple[int, int]

    @classmethod
    def learn(cls, tokenizer: TextTokenizer) -> "PairLayout":
        """Finds it from a pair: each tokenizer says in its own way how it marks two texts."""
        found = tokenizer.encode_pair("a", "b")
        places = found.sequence_ids
        if 0 not in places or 1 not in places:
            raise ConfigError(
                "the tokenizer makes no pairs of texts: take the tokenizer.json that the model came with",
                reason="invalid_tokenizer",
            )
        first, second = places.index(0), places.index(1)
        bounds = ((0, first), (first + places.count(0), second), (second + places.count(1), len(places)))
        runs = [_Run(found.ids[start:end], found.type_ids[start:end]) for start, end in bounds]
        return cls(runs[0], runs[1], runs[2], (found.type_ids[first], found.type_ids[second]))

    @property
    def special_count(self) -> int:
        return len(self.before.ids) + len(self.between.ids) + len(self.after.ids)

    def join(self, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
        """Returns ids and types."""
        of_first, of_second = self.text_types
        ids = [*self.before.ids, *first, *self.between.ids, *second, *self.after.ids]
        types = [*self.before.types, *[of_first] * len(first), *self.between.types]
        return ids, [*types, *[of_second] * len(second), *self.after.types]


class PairTokens:
    """What is too long is cut, the second text first; a first text that fills it all leaves none of the second."""

    def __init__(self, tokenizer: TextTokenizer, max_length: int) -> None:
        self._layout = PairLayout.learn(tokenizer)
        self._room = max_length - self._layout.special_count
        if self._room < 2:
            raise ConfigError(
                f"score.max_length: {max_length} leaves no room for two texts beside the "
                f"{self._layout.special_count} special tokens of a pair; set a larger one"
            )

    def pieces(self, pairs: Iterable[tuple[list[int], list[int]]]) -> Iterator[Piece]:
        """Of texts' ids without special tokens."""
        for first, second in pairs:
            kept = first[: self._room]
            ids, types = self._layout.join(kept, second[: self._room - len(kept)])
            arrays = {IDS: np.array(ids, dtype=np.int64), TYPES: np.array(types, dtype=np.int64)}
            yield Piece(arrays, length=len(ids), key="pair")
