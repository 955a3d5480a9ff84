"""What accuracy is measured by, against numbers worked out by hand or by another library."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from penstock.core.tensors import from_array
from penstock.models.convert.fidelity import Answers, cosines, distribution, psnr_db, rank_agreement, rule_of, spearman
from penstock.models.convert.speed import Speed


def test_cosines_row_by_row() -> None:
    expected = np.array([[1, 0], [3, 4], [0, 0], [0, 0]], np.float32)
    found = np.array([[0, 2], [6, 8], [0, 0], [1, 0]], np.float32)
    assert cosines(expected, found).tolist() == pytest.approx([0, 1, 1, 0])


def test_a_distribution_names_its_low_end() -> None:
    found = distribution(np.arange(101, dtype=np.float64) / 100)
    assert found == {"mean": 0.5, "min": 0.0, "p1": 0.01, "p5": 0.05, "p50": 0.5}


def test_spearman_is_that_of_scipy_also_where_values_are_equal() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        one, other = rng.integers(0, 6, 40).astype(float), rng.integers(0, 6, 40).astype(float)
        assert spearman(one, other) == pytest.approx(spearmanr(one, other).statistic)
    assert spearman(np.ones(4), np.ones(4)) == 1.0
    assert spearman(np.ones(4), np.arange(4)) == 0.0


def test_rank_agreement() -> None:
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
    moved[0, [12, 24]] = moved[0, [24, 12]]  # one leaves the best ten; the worst ten stay
    assert rank_agreement(more, moved)["top10_overlap"] == 0.9


def test_psnr() -> None:
    black = np.zeros((4, 4), np.uint8)
    assert psnr_db(black, black) == 100.0
    assert psnr_db(black, black + np.uint8(255)) == 0.0
    assert psnr_db(black, black + np.uint8(1)) == pytest.approx(48.1308, abs=1e-4)


def test_scores_are_compared_by_their_order_for_each_query() -> None:
    def answers(scores: list[list[float]]) -> Answers:
        return [[[from_array("score", np.array([[score]], np.float32))] for score in row] for row in scores]

    expected, found = answers([[0.9, 0.5, 0.1], [0.2, 0.4, 0.6]]), answers([[0.8, 0.5, 0.2], [0.7, 0.4, 0.1]])
    value, details = rule_of("score").compare(expected, found)
    assert value == details["ranks"]["spearman"] == 0.0  # one order as before, one turned round
    assert (details["ranks"]["queries"], details["ranks"]["passages"]) == (2, 3)
    assert details["ranks"]["top1_agreement"] == 0.5
    assert details["difference"]["max"] == pytest.approx(0.5)
    assert details["difference"]["mean"] == pytest.approx(0.2)


def test_speed_is_the_median_of_the_rounds_ratios() -> None:
    faster, slower = Speed(40.0, (40.0, 20.0, 60.0)), Speed(10.0, (10.0, 10.0, 20.0))
    assert faster.over(slower) == pytest.approx((3.0, 1 / 3))
    assert slower.over(faster)[0] == pytest.approx(1 / 3)


def test_every_task_has_a_floor() -> None:
    assert [rule_of(task).floor for task in ("embed", "score", "classify", "upscale", "tensor", "other")] == [
        0.98,
        0.95,
        0.98,
        40.0,
        0.98,
        0.98,
    ]
