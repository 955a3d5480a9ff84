"""Scores of passages for a query, and the order that they make."""

import numpy as np

from penstock.core.tensors import Array


def cosines(queries: Array, passages: Array) -> Array:
    """Of each passage with its query, or with the only one; a vector of zeros is like none."""
    lengths = np.linalg.norm(queries, axis=1) * np.linalg.norm(passages, axis=1)
    found: Array = np.zeros_like(lengths)
    np.divide(np.einsum("ij,ij->i", *np.broadcast_arrays(queries, passages)), lengths, out=found, where=lengths > 0)
    return found.clip(-1, 1)  # rounding may lead a little beyond


def best_first(scores: Array, top_n: int | None = None) -> list[tuple[int, float]]:
    """Indices and scores, equal ones as they came; `top_n` of them, or all."""
    return [(int(index), float(scores[index])) for index in np.argsort(-scores, kind="stable")[:top_n]]
