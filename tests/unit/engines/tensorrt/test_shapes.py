"""The sizes that engines are built for, and which of them a batch runs in."""

import pytest

from penstock.core.errors import ConfigError
from penstock.core.tensors import TensorSpec
from penstock.engines.options import ShapeRange
from penstock.engines.tensorrt.shapes import ShapeLimits, find_profile, plan_profiles

IDS = TensorSpec("input_ids", "INT64", (-1, -1))
IMAGE = TensorSpec("image", "FP32", (-1, 1, -1, -1))


def test_texts_have_profiles_by_length_and_rows_by_tokens() -> None:
    profiles = plan_profiles([IDS], ShapeLimits(rows=64, tokens=1024, length=256))
    assert [profile["input_ids"] for profile in profiles] == [
        ((1, 1), (16, 64), (64, 64)),
        ((1, 1), (8, 128), (15, 128)),  # nothing shorter than 65 tokens comes here
        ((1, 1), (4, 256), (7, 256)),
    ]


def test_without_a_budget_all_rows_may_be_long() -> None:
    profiles = plan_profiles([IDS], ShapeLimits(rows=8, length=512))
    assert [profile["input_ids"][2] for profile in profiles] == [(8, 64), (8, 128), (8, 256), (8, 512)]


def test_short_texts_have_one_profile() -> None:
    assert len(plan_profiles([IDS], ShapeLimits(rows=8, length=64))) == 1


def test_images_go_by_their_side() -> None:
    (profile,) = plan_profiles([IMAGE], ShapeLimits(rows=2, side=512))
    assert profile["image"] == ((1, 1, 1, 1), (2, 1, 512, 512), (2, 1, 512, 512))


def test_what_is_closed_needs_no_profile() -> None:
    assert plan_profiles([TensorSpec("x", "FP32", (1, 8))], ShapeLimits()) == ()


def test_what_nothing_tells_is_asked_for() -> None:
    audio = TensorSpec("audio", "FP32", (-1, 80, -1))
    with pytest.raises(ConfigError, match=r"leaves a size open.*shapes: \{audio: \{min: \[…, 80, …\]") as raised:
        plan_profiles([audio], ShapeLimits(rows=8))
    assert raised.value.reason == "open_shape"
    given = ShapeRange(min=(1, 80, 16), opt=(4, 80, 100), max=(8, 80, 3000))
    (profile,) = plan_profiles([audio], ShapeLimits(rows=8, given={"audio": given}))
    assert profile["audio"] == ((1, 80, 16), (4, 80, 100), (8, 80, 3000))


def test_what_is_given_must_fit_the_network() -> None:
    wrong = ShapeRange(min=(1, 79, 16), opt=(1, 79, 16), max=(1, 79, 16))
    with pytest.raises(ConfigError, match=r"\[1, 79, 16\] does not fit the network's \[-1, 80, -1\]"):
        plan_profiles([TensorSpec("audio", "FP32", (-1, 80, -1))], ShapeLimits(given={"audio": wrong}))
    with pytest.raises(ConfigError, match="names 'sound', and the network's inputs are input_ids"):
        plan_profiles([IDS], ShapeLimits(given={"sound": wrong}))


def test_a_range_grows() -> None:
    for sizes in (((2,), (1,), (3,)), ((1,), (4,), (3,)), ((1,), (1, 2), (3,))):
        with pytest.raises(ValueError, match="min"):
            ShapeRange(min=sizes[0], opt=sizes[1], max=sizes[2])


def test_a_batch_runs_in_the_smallest_profile_that_it_fits_into() -> None:
    profiles = plan_profiles([IDS], ShapeLimits(rows=64, tokens=1024, length=256))
    assert [find_profile(profiles, {"input_ids": shape}) for shape in ((64, 16), (15, 65), (1, 256))] == [0, 1, 2]
    assert [find_profile(profiles, {"input_ids": shape}) for shape in ((65, 1), (1, 257), (0, 4), (1,))] == [None] * 4
