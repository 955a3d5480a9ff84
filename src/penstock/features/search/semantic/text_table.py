"""A table of the blocks' texts with their vectors and words; scores the texts for a query. Pure: no I/O."""

import re
from collections.abc import Iterable, Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

WORD = re.compile(r"\w+")
FIRST_ROWS = 1024

Rows = NDArray[np.int64]
Scores = NDArray[np.float32]


class TextTable:
    """A table of texts, in which blocks with the same text share a row."""

    def __init__(self) -> None:
        self._row_of: dict[str, int] = {}
        self._texts: list[str] = []  # by row
        self._vectors: NDArray[np.float32] = np.zeros((0, 0), np.float32)  # of length 1
        self._has_vector: NDArray[np.bool_] = np.zeros(FIRST_ROWS, np.bool_)
        self._rows_with: dict[str, list[int]] = {}  # rows by word
        self.vectors = 0

    def __len__(self) -> int:
        return len(self._row_of)

    def rows(self, texts: Iterable[str]) -> Rows:
        """Return the row of each text; add rows for new texts."""
        known, texts = self._row_of, list(texts)
        try:
            return np.array([known[text] for text in texts], np.int64)
        except KeyError:
            return np.array([known[text] if text in known else self._add_row(text) for text in texts], np.int64)

    def find_texts_without_vector(self, rows: Rows) -> list[str]:
        """Return the texts of those rows that have no vector, each text once."""
        return [self._texts[row] for row in np.unique(rows[~self._has_vector[rows]]).tolist()]

    def put(self, texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
        """Set the vectors of texts."""
        if not len(texts):
            return
        rows = self.rows(texts)
        width = vectors.shape[1]
        if self._vectors.shape[1] != width or len(self._vectors) < len(self._has_vector):
            grown = np.zeros((len(self._has_vector), width), np.float32)
            if self._vectors.shape[1] == width:
                grown[: len(self._vectors)] = self._vectors
            self._vectors = grown
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        self._vectors[rows] = vectors / np.maximum(norms, 1e-12)
        self._has_vector[rows] = True
        self.vectors = int(self._has_vector.sum())

    def compute_similarities(self, rows: Rows, query: NDArray[np.float32]) -> Scores:
        """Return the cosine of the query's vector with each row, at least 0; -1 for a row without a vector."""
        scores: Scores = np.full(len(rows), -1.0, np.float32)
        if not self._vectors.shape[1]:
            return scores
        query = query / max(float(np.linalg.norm(query)), 1e-12)
        has_vector = self._has_vector[rows]
        if len(rows) * 2 > len(self._row_of):
            found = (self._vectors[: len(self._row_of)] @ query)[rows[has_vector]]
        else:
            found = self._vectors[rows[has_vector]] @ query
        scores[has_vector] = np.clip(found, 0.0, 1.0)
        return scores

    def compute_word_scores(self, rows: Rows, query: str) -> Scores:
        """Return the fraction of the query's words that each row has; rare words count more."""
        found: Scores = np.zeros(len(self._row_of), np.float32)
        total = 0.0
        for word in set(WORD.findall(query.casefold())):
            having = self._rows_with.get(word, [])
            weight = log(1 + len(self._row_of) / (1 + len(having)))
            found[np.array(having, np.int64)] += weight
            total += weight
        return found[rows] / total if total else found[rows]

    def _add_row(self, text: str) -> int:
        row = self._row_of[text] = len(self._texts)
        self._texts.append(text)
        if row >= len(self._has_vector):
            self._has_vector = np.concatenate([self._has_vector, np.zeros(len(self._has_vector), np.bool_)])
            if self._vectors.shape[1]:
                self._vectors = np.concatenate([self._vectors, np.zeros_like(self._vectors)])
        for word in set(WORD.findall(text.casefold())):
            self._rows_with.setdefault(word, []).append(row)
        return row
