"""Pairs of texts as a cross-encoder takes them."""

from collections.abc import Iterable, Iterator

from penstock.core.errors import ConfigError
from penstock.tasks.text import TextTokenizer


class PairTokens:
    """What is too long is cut, the second text first; a first text that fills it all leaves none of the second."""

    def __init__(self, tokenizer: TextTokenizer, max_length: int) -> None:
        """Learns from a pair where the special tokens stand: each tokenizer says in its own way how it marks two."""
        found = tokenizer.encode_pair("a", "b")
        places = found.sequence_ids
        if 0 not in places or 1 not in places:
            raise ConfigError(
                "the tokenizer makes no pairs of texts: take the tokenizer.json that the model came with",
                reason="invalid_tokenizer",
            )
        first, second = places.index(0), places.index(1)
        bounds = ((0, first), (first + places.count(0), second), (second + places.count(1), len(places)))
        # Ids and types before the texts, between them and after them.
        self._special = [(found.ids[start:end], found.type_ids[start:end]) for start, end in bounds]
        self._text_types = (found.type_ids[first], found.type_ids[second])
        special_count = sum(end - start for start, end in bounds)
        self._room = max_length - special_count
        if self._room < 2:
            raise ConfigError(
                f"score.max_length: {max_length} leaves no room for two texts beside the "
                f"{special_count} special tokens of a pair; set a larger one"
            )

    def rows(self, pairs: Iterable[tuple[list[int], list[int]]]) -> Iterator[tuple[list[int], list[int]]]:
        """Ids and types, of texts' ids without special tokens."""
        (before, between, after), (of_first, of_second) = self._special, self._text_types
        for whole_first, whole_second in pairs:
            first = whole_first[: self._room]
            second = whole_second[: self._room - len(first)]
            ids = [*before[0], *first, *between[0], *second, *after[0]]
            types = [*before[1], *[of_first] * len(first), *between[1], *[of_second] * len(second), *after[1]]
            yield ids, types
