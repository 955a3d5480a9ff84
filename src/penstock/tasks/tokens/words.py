"""Token ids of words that were met before, in front of a tokenizer."""

from collections.abc import Callable, Iterable
from itertools import chain, islice

from penstock.tasks.tokens.wordwise import SpecialIds

MOST_WORDS = 32_768  # that are kept twice at most: the newer ones, and those that they took the place of
# What is longer is rarely met again, and would make the bound of words none of memory.
MOST_CHARS = 32
MOST_IDS = 8
LEARNT_SHARE = 8  # of a text that is mostly new, every so many words are learnt: asking word by word costs twice

WordIds = dict[str, tuple[int, ...]]


class KnownWords:
    """Whatever is not kept is asked for: the ids are always the tokenizer's own.

    Any thread may call it: nothing that is kept ever changes, and what two add or drop at once is only asked for anew.
    """

    def __init__(self, ask: Callable[[list[str]], list[list[int]]], most_words: int = MOST_WORDS) -> None:
        """`ask` gives the ids of texts without special ones; it may cut them at the length that `encode` is given."""
        self._ask = ask
        self._most_words = most_words
        self._newer: WordIds = {"": ()}
        self._older: WordIds = {}
        self._ids: dict[int, int] = {}  # one object for each, however many words have it

    def encode(self, texts: Iterable[str], special: SpecialIds, max_length: int) -> list[list[int]]:
        before, after = special.before, special.after
        most = max_length - len(after)
        ids_of = self._newer.__getitem__
        rows: list[list[int]] = []
        late: list[tuple[list[int], str, list[str]]] = []
        for text in texts:
            # Only at blanks that are blanks in every step of every tokenizer here: what else is one to some, or to
            # Python, stays within a word.
            words = (text.replace("\n", " ") if "\n" in text else text).split(" ")
            row: list[int] = [*before]
            try:
                row += chain.from_iterable(map(ids_of, words))
            except KeyError:
                late.append((row, text, words))
            rows.append(row)
        if late:
            self._fill(late, before)
        for row in rows:
            del row[most:]
            row += after
        return rows

    def _fill(self, late: list[tuple[list[int], str, list[str]]], before: tuple[int, ...]) -> None:
        newer, older = self._newer, self._older
        wanted: set[str] = set()
        asked: list[tuple[list[int], str]] = []
        known: list[tuple[list[int], list[str]]] = []
        for row, text, words in late:
            unknown = set(words).difference(newer).difference(older)
            if 2 * len(unknown) > len(words):
                asked.append((row, text))
                short = (word for word in unknown if len(word) <= MOST_CHARS)
                wanted.update(islice(short, 1 + len(words) // LEARNT_SHARE))
            else:
                known.append((row, words))
                wanted.update(words)
        ids_of = self._learn(wanted, newer, older).__getitem__
        for row, words in known:
            row[:] = chain(before, chain.from_iterable(map(ids_of, words)))
        if asked:
            for (row, _), ids in zip(asked, self._ask([text for _, text in asked]), strict=True):
                row[:] = chain(before, ids)

    def _learn(self, words: set[str], newer: WordIds, older: WordIds) -> WordIds:
        """The ids of these words."""
        found = {word: ids for word in words if (ids := newer.get(word)) is not None}
        kept = {word: ids for word in words if word not in found and (ids := older.get(word)) is not None}
        found |= kept
        rest = [word for word in words if word not in found]
        for word, row in zip(rest, self._ask(rest) if rest else (), strict=True):
            ids = found[word] = tuple(self._ids.setdefault(id, id) for id in row)
            if len(word) <= MOST_CHARS and len(ids) <= MOST_IDS:
                kept[word] = ids
        if len(newer) + len(kept) <= self._most_words:
            newer.update(kept)
        elif len(kept) < self._most_words:
            self._older, self._newer = newer, {"": (), **kept}
        return found
