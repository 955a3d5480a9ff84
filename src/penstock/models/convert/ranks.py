"""How alike two sets of numbers are: cosines, orders of preference, peak signal to noise."""

import numpy as np

from penstock.core import ranking
from penstock.core.tensors import Array

TOP = 10
SAME_DB = 100.0  # of images without a difference, whose PSNR is infinite


def cosines(expected: Array, found: Array) -> Array:
    """Row by row; of two rows of zeros it is 1, of one it is 0."""
    values = ranking.cosines(expected.astype(np.float64), found.astype(np.float64))
    values[~expected.any(axis=1) & ~found.any(axis=1)] = 1.0
    return values


def distribution(values: Array) -> dict[str, float]:
    low, lower, middle = np.percentile(values, (1, 5, 50))
    found = {"mean": values.mean(), "min": values.min(), "p1": low, "p5": lower, "p50": middle}
    return {name: round(float(value), 6) for name, value in found.items()}


def rank_agreement(expected: Array, found: Array) -> dict[str, float]:
    """How far two sets of scores [queries, passages] would show a reader the same."""
    queries, passages = expected.shape
    best = np.argmax(expected, axis=1) == np.argmax(found, axis=1)
    top = min(TOP, passages)
    overlaps = [len(_best(a, top) & _best(b, top)) / top for a, b in zip(expected, found, strict=True)]
    orders = [spearman(a, b) for a, b in zip(expected, found, strict=True)]
    return {
        "queries": queries,
        "passages": passages,
        "top1_agreement": round(float(best.mean()), 6),
        f"top{top}_overlap": round(float(np.mean(overlaps)), 6),
        "spearman": round(float(np.mean(orders)), 6),
        "spearman_min": round(float(np.min(orders)), 6),
    }


def spearman(expected: Array, found: Array) -> float:
    """The correlation of the ranks; what is equal shares a rank."""
    one, other = _ranks(expected), _ranks(found)
    one, other = one - one.mean(), other - other.mean()
    product = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / product if product else float(np.array_equal(one, other))


def psnr_db(expected: Array, found: Array) -> float:
    """Pixels are from 0 to 255."""
    error = float(np.mean((expected.astype(np.float64) - found.astype(np.float64)) ** 2))
    return min(SAME_DB, float(10 * np.log10(255**2 / error))) if error else SAME_DB


def _best(scores: Array, count: int) -> set[int]:
    return set(np.argsort(-scores, kind="stable")[:count].tolist())


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Array = ((ends - counts + ends - 1) / 2)[inverse]
    return ranks
