"""Similarity scores of passages for a query, and their order."""

import numpy as np

from penstock.core.tensors import Array


def compute_cosines(queries: Array, passages: Array) -> Array:
    """Return the cosine of each passage with its query (or with the only query); 0 if either vector is zero."""
    lengths = np.linalg.norm(queries, axis=1) * np.linalg.norm(passages, axis=1)
    found: Array = np.zeros_like(lengths)
    np.divide(np.einsum("ij,ij->i", *np.broadcast_arrays(queries, passages)), lengths, out=found, where=lengths > 0)
    return found.clip(-1, 1)  # rounding errors may exceed the range


def rank_best_first(scores: Array, top_n: int | None = None) -> list[tuple[int, float]]:
    """Return the `top_n` (default: all) indices with their scores, best first; equal scores keep their order."""
    return [(int(index), float(scores[index])) for index in np.argsort(-scores, kind="stable")[:top_n]]
