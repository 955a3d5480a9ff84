"""Comparisons of answers, checked with figures computed by hand or by another library."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from penstock.core.tensors import from_array
from penstock.tasks.built_in import BUILT_IN
from penstock.tasks.comparison import Answers, cosines, distribution, psnr_db, rank_agreement, spearman


def test_cosines_are_computed_row_by_row() -> None:
    expected = np.array([[1, 0], [3, 4], [0, 0], [0, 0]], np.float32)
    found = np.array([[0, 2], [6, 8], [0, 0], [1, 0]], np.float32)
    assert cosines(expected, found).tolist() == pytest.approx([0, 1, 1, 0])


def test_distribution_has_low_percentiles() -> None:
    found = distribution(np.arange(101, dtype=np.float64) / 100)
    assert found == {"mean": 0.5, "min": 0.0, "p1": 0.01, "p5": 0.05, "p50": 0.5}


def test_spearman_equals_scipy_with_ties() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        one, other = rng.integers(0, 6, 40).astype(float), rng.integers(0, 6, 40).astype(float)
        assert spearman(one, other) == pytest.approx(spearmanr(one, other).statistic)
    assert spearman(np.ones(4), np.ones(4)) == 1.0
    assert spearman(np.ones(4), np.arange(4)) == 0.0


def test_rank_agreement_compares_the_best_ten() -> None:
    expected = np.array([[3.0, 2, 1, 0], [0, 1, 2, 3]])
    found = np.array([[2.0, 3, 1, 0], [0, 1, 2, 3]])
    assert rank_agreement(expected, found) == {
        "queries": 2,
        "passages": 4,
        "top1_agreement": 0.5,
        "top4_overlap": 1.0,
        "spearman": 0.9,
        "spearman_min": 0.8,
    }
    many = np.tile(np.arange(20.0), (1, 1))
    assert rank_agreement(many, -many)["top10_overlap"] == 0.0
    more = np.arange(25.0)[np.newaxis]
    moved = more.copy()
    moved[0, [12, 24]] = moved[0, [24, 12]]  # one passage leaves the best ten; the worst ten do not change
    assert rank_agreement(more, moved)["top10_overlap"] == 0.9


def test_psnr_is_computed() -> None:
    black = np.zeros((4, 4), np.uint8)
    assert psnr_db(black, black) == 100.0
    assert psnr_db(black, black + np.uint8(255)) == 0.0
    assert psnr_db(black, black + np.uint8(1)) == pytest.approx(48.1308, abs=1e-4)


def test_scores_are_compared_by_their_order_for_each_query() -> None:
    def answers(scores: list[list[float]]) -> Answers:
        return [[[from_array("score", np.array([[score]], np.float32))] for score in row] for row in scores]

    expected, found = answers([[0.9, 0.5, 0.1], [0.2, 0.4, 0.6]]), answers([[0.8, 0.5, 0.2], [0.7, 0.4, 0.1]])
    value, details = BUILT_IN["score"].comparison.compare(expected, found)
    assert value == details["ranks"]["spearman"] == 0.0  # one order is unchanged, the other reversed
    assert (details["ranks"]["queries"], details["ranks"]["passages"]) == (2, 3)
    assert details["ranks"]["top1_agreement"] == 0.5
    assert details["difference"]["max"] == pytest.approx(0.5)
    assert details["difference"]["mean"] == pytest.approx(0.2)
