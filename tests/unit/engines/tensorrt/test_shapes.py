"""The shapes that engines are built for, and the profile that a batch runs in."""

import pytest

from penstock.core.errors import ConfigError
from penstock.core.tensors import TensorSpec
from penstock.engines.engine_options import ShapeRange
from penstock.engines.tensorrt.shapes import ShapeLimits, find_profile, plan_profiles

IDS = TensorSpec("input_ids", "INT64", (-1, -1))
IMAGE = TensorSpec("image", "FP32", (-1, 1, -1, -1))


def test_profiles_of_texts_depend_on_length_and_their_rows_on_tokens() -> None:
    profiles = plan_profiles([IDS], ShapeLimits(rows=64, tokens=1024, length=256))
    assert [profile["input_ids"] for profile in profiles] == [
        ((1, 1), (16, 64), (64, 64)),
        ((1, 1), (8, 128), (15, 128)),  # no batch below 65 tokens uses this profile
        ((1, 1), (4, 256), (7, 256)),
    ]


def test_without_a_token_budget_all_rows_can_be_long() -> None:
    profiles = plan_profiles([IDS], ShapeLimits(rows=8, length=512))
    assert [profile["input_ids"][2] for profile in profiles] == [(8, 64), (8, 128), (8, 256), (8, 512)]


def test_short_texts_have_one_profile() -> None:
    assert len(plan_profiles([IDS], ShapeLimits(rows=8, length=64))) == 1


def test_profiles_of_images_depend_on_their_longer_side() -> None:
    (profile,) = plan_profiles([IMAGE], ShapeLimits(rows=2, side=512))
    assert profile["image"] == ((1, 1, 1, 1), (2, 1, 512, 512), (2, 1, 512, 512))


def test_fixed_shapes_need_no_profile() -> None:
    assert plan_profiles([TensorSpec("x", "FP32", (1, 8))], ShapeLimits()) == ()


def test_missing_shape_limits_are_requested() -> None:
    audio = TensorSpec("audio", "FP32", (-1, 80, -1))
    with pytest.raises(ConfigError, match=r"leaves a size open.*shapes: \{audio: \{min: \[…, 80, …\]") as raised:
        plan_profiles([audio], ShapeLimits(rows=8))
    assert raised.value.reason == "open_shape"
    given = ShapeRange(min=(1, 80, 16), opt=(4, 80, 100), max=(8, 80, 3000))
    (profile,) = plan_profiles([audio], ShapeLimits(rows=8, ranges={"audio": given}))
    assert profile["audio"] == ((1, 80, 16), (4, 80, 100), (8, 80, 3000))


def test_configured_shapes_must_fit_the_network() -> None:
    wrong = ShapeRange(min=(1, 79, 16), opt=(1, 79, 16), max=(1, 79, 16))
    with pytest.raises(ConfigError, match=r"\[1, 79, 16\] does not fit the network's \[-1, 80, -1\]"):
        plan_profiles([TensorSpec("audio", "FP32", (-1, 80, -1))], ShapeLimits(ranges={"audio": wrong}))
    with pytest.raises(ConfigError, match="names 'sound', but the network's inputs are input_ids"):
        plan_profiles([IDS], ShapeLimits(ranges={"sound": wrong}))


def test_the_sizes_of_a_shape_range_must_ascend() -> None:
    for sizes in (((2,), (1,), (3,)), ((1,), (4,), (3,)), ((1,), (1, 2), (3,))):
        with pytest.raises(ValueError, match="min"):
            ShapeRange(min=sizes[0], opt=sizes[1], max=sizes[2])


def test_a_batch_runs_in_the_smallest_profile_that_it_fits_into() -> None:
    profiles = plan_profiles([IDS], ShapeLimits(rows=64, tokens=1024, length=256))
    assert [find_profile(profiles, {"input_ids": shape}) for shape in ((64, 16), (15, 65), (1, 256))] == [0, 1, 2]
    assert [find_profile(profiles, {"input_ids": shape}) for shape in ((65, 1), (1, 257), (0, 4), (1,))] == [None] * 4
