"""A cache of the token ids of words, so that the tokenizer is called less often."""

from collections.abc import Callable, Iterable
from itertools import chain, islice

from penstock.tasks.tokens.special_ids import SpecialIds

MOST_WORDS = 32_768  # per generation; two generations are kept
# Longer words are not cached: they rarely occur again, and the cache's memory would be unbounded.
MOST_CHARS = 32
MOST_IDS = 8
CACHED_SHARE = 8  # of a text with mostly unknown words, one in 8 is cached, because encoding single words takes longer

WordIds = dict[str, tuple[int, ...]]


class WordCache:
    """Encodes texts word by word, with the tokenizer's ids of each word.

    Threads may share a cache: entries never change, and a race between threads only costs one more call of the
    tokenizer.
    """

    def __init__(self, tokenize: Callable[[list[str]], list[list[int]]], most_words: int = MOST_WORDS) -> None:
        """`tokenize` returns the token ids of texts, without special tokens; it may truncate them to `max_length`."""
        self._tokenize = tokenize
        self._most_words = most_words
        self._newer: WordIds = {"": ()}
        self._older: WordIds = {}
        self._ids: dict[int, int] = {}  # one int object per id, shared by all words

    def encode(self, texts: Iterable[str], special: SpecialIds, max_length: int) -> list[list[int]]:
        before, after = special.before, special.after
        most = max_length - len(after)
        ids_of = self._newer.__getitem__
        rows: list[list[int]] = []
        late: list[tuple[list[int], str, list[str]]] = []
        for text in texts:
            # Split only at characters that all supported tokenizers treat as blanks in all steps.
            words = (text.replace("\n", " ") if "\n" in text else text).split(" ")
            row: list[int] = [*before]
            try:
                row += chain.from_iterable(map(ids_of, words))
            except KeyError:
                late.append((row, text, words))
            rows.append(row)
        if late:
            self._encode_unknown(late, before)
        for row in rows:
            del row[most:]
            row += after
        return rows

    def _encode_unknown(self, late: list[tuple[list[int], str, list[str]]], before: tuple[int, ...]) -> None:
        newer, older = self._newer, self._older
        wanted: set[str] = set()
        asked: list[tuple[list[int], str]] = []
        known: list[tuple[list[int], list[str]]] = []
        for row, text, words in late:
            unknown = set(words).difference(newer).difference(older)
            if 2 * len(unknown) > len(words):
                asked.append((row, text))
                short = (word for word in unknown if len(word) <= MOST_CHARS)
                wanted.update(islice(short, 1 + len(words) // CACHED_SHARE))
            else:
                known.append((row, words))
                wanted.update(words)
        ids_of = self._cache_words(wanted, newer, older).__getitem__
        for row, words in known:
            row[:] = chain(before, chain.from_iterable(map(ids_of, words)))
        if asked:
            for (row, _), ids in zip(asked, self._tokenize([text for _, text in asked]), strict=True):
                row[:] = chain(before, ids)

    def _cache_words(self, words: set[str], newer: WordIds, older: WordIds) -> WordIds:
        """Return the ids of the words, and cache the new words."""
        found = {word: ids for word in words if (ids := newer.get(word)) is not None}
        kept = {word: ids for word in words if word not in found and (ids := older.get(word)) is not None}
        found |= kept
        rest = [word for word in words if word not in found]
        for word, row in zip(rest, self._tokenize(rest) if rest else (), strict=True):
            ids = found[word] = tuple(self._ids.setdefault(id, id) for id in row)
            if len(word) <= MOST_CHARS and len(ids) <= MOST_IDS:
                kept[word] = ids
        if len(newer) + len(kept) <= self._most_words:
            newer.update(kept)
        elif len(kept) < self._most_words:
            self._older, self._newer = newer, {"": (), **kept}
        return found
