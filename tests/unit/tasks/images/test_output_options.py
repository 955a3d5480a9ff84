"""The options of an image answer, and errors for invalid ones."""

import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.requests import Parameter
from penstock.tasks.images.output_options import DEFAULTS, OutputOptions, Size, read_output_options

MODES = ("upscale", "denoise")


def read(**parameters: Parameter) -> OutputOptions:
    return read_output_options(parameters, MODES)


def test_default_is_a_png() -> None:
    assert read() == read(top_k=3) == DEFAULTS == OutputOptions("upscale", "png")


def test_common_spellings_are_accepted() -> None:
    assert read(format="JPG", quality="80", mode=" Denoise ") == OutputOptions("denoise", "jpeg", 80)
    assert read(format="webp", quality=1).quality == 1


@pytest.mark.parametrize(
    ("said", "image", "size"),
    [
        ("2x", (30, 20), (60, 40)),
        ("x3", (30, 20), (90, 60)),
        ("1.5X", (31, 20), (46, 30)),
        ("1080p", (960, 540), (1920, 1080)),
        ("1080P", (540, 960), (1080, 1920)),
        ("1080p", (64, 48), (1440, 1080)),
        ("1080p", (1000, 400), (1920, 768)),
        ("480p", (16, 9), (853, 480)),
        ("4k", (10, 10), (2160, 2160)),
        ("8K", (16, 9), (7680, 4320)),
        ("1920x1080", (540, 960), (608, 1080)),
        ("200 × 100", (1, 1), (100, 100)),
    ],
)
def test_an_image_is_fitted_into_the_requested_frame(said: str, image: Size, size: Size) -> None:
    resolution = read(resolution=said).resolution
    assert resolution is not None
    assert resolution.size(image) == size
    assert resolution.most_pixels(image[0] * image[1]) >= size[0] * size[1]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"format": "gif"}, "'format' is 'gif'; it must be png, jpeg or webp"),
        ({"format": 3}, "it must be png"),
        ({"quality": 80}, "'quality' is for jpeg and webp"),
        ({"format": "jpeg", "quality": 0}, "a whole number from 1 to 100"),
        ({"format": "jpeg", "quality": "best"}, "a whole number from 1 to 100"),
        ({"format": "webp", "quality": True}, "a whole number from 1 to 100"),
        ({"mode": "colourize"}, "'mode' is 'colourize'; it must be upscale or denoise"),
        ({"mode": 1}, "it must be upscale or denoise"),
        ({"resolution": "large"}, "a factor such as 2x"),
        ({"resolution": ""}, "a factor such as 2x"),
        ({"resolution": "0x"}, "a factor such as 2x"),
        ({"resolution": "0x0"}, "a factor such as 2x"),
        ({"resolution": "-2x"}, "a factor such as 2x"),
        ({"resolution": 1080}, "a factor such as 2x"),
        ({"resolution": "9" * 500}, "a factor such as 2x"),
    ],
)
def test_invalid_options_are_rejected(parameters: dict[str, Parameter], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        read_output_options(parameters, MODES)
    assert caught.value.fields["parameter"] in parameters
    assert len(caught.value.message) < 300


def test_mode_without_a_network_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="no network for that: call a model that has one"):
        read_output_options({"mode": "denoise"}, ("upscale",))


def test_size_limit_of_a_format_is_checked() -> None:
    read(format="webp").check_size((16_383, 10))
    read(format="png").check_size((100_000, 10))
    with pytest.raises(InvalidRequest, match="a webp file has at most 16383 along a side: request format png"):
        read(format="webp").check_size((10, 16_384))
