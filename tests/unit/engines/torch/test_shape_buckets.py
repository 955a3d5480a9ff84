"""The shapes that CUDA graphs are captured for: complete and bounded in number."""

import pytest

from penstock.engines.torch.shape_buckets import MOST_SHAPES, ShapeBuckets

GPU = ShapeBuckets(max_rows=1024, max_length=256, max_tokens=65_536)


@pytest.mark.parametrize(
    ("rows", "length", "shape"),
    [
        (1, 1, (8, 16)),
        (8, 16, (8, 16)),
        (9, 17, (16, 32)),
        (33, 100, (64, 112)),
        (65, 256, (128, 256)),
        (1024, 64, (1024, 64)),
        (1000, 60, (1024, 64)),
    ],
)
def test_a_batch_is_padded_to_the_next_shape(rows: int, length: int, shape: tuple[int, int]) -> None:
    assert GPU.fit(rows, length) == shape


def test_every_possible_batch_has_a_shape() -> None:
    shapes = set(GPU.shapes())
    for rows in (*range(1, 130), *range(190, 1025, 61), 1024):
        for length in range(1, 257, 5):
            if rows * length <= 65_536:
                assert GPU.fit(rows, length) in shapes


def test_the_largest_shape_comes_first() -> None:
    sizes = [rows * length for rows, length in GPU.shapes()]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) < 300


def test_a_maximum_length_between_two_steps_is_the_last_length() -> None:
    buckets = ShapeBuckets(max_rows=8, max_length=100)
    assert buckets.fit(3, 99) == (8, 100)
    assert buckets.shapes()[:2] == [(8, 100), (8, 96)]
    assert buckets.fit(3, 120) not in buckets.shapes()  # no length is greater than the model's


def test_the_largest_shapes_are_left_out_if_there_are_too_many() -> None:
    shapes = ShapeBuckets(max_rows=65_536, max_length=8192).shapes()
    assert len(shapes) == MOST_SHAPES
    assert shapes[-1] == (8, 16)
