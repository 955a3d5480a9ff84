"""Speed figures over several rounds."""

import pytest

from penstock.models.convert.speed import Speed


def test_speed_ratio_is_the_median_over_rounds() -> None:
    faster, slower = Speed(40.0, (40.0, 20.0, 60.0)), Speed(10.0, (10.0, 10.0, 20.0))
    assert faster.compare_with(slower) == pytest.approx((3.0, 1 / 3))
    assert slower.compare_with(faster)[0] == pytest.approx(1 / 3)


def test_a_clear_gain_is_preferred_to_a_noisy_one() -> None:
    original = Speed(10.0, (10.0, 10.0, 10.0))
    clear, noisy = Speed(15.0, (15.0, 15.0, 14.5)), Speed(17.0, (17.0, 24.0, 10.0))
    assert clear.compare_with(original)[0] < noisy.compare_with(original)[0]
    assert clear.certain_gain(original) > noisy.certain_gain(original)
