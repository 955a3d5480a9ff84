"""The GPU benchmark without a GPU: the requests that it sends, and the figures that it computes."""

import pytest

from benchmarks.gpu.figures import compute_growth, compute_image_figure, compute_soak_figures
from benchmarks.gpu.photographs import HEIGHT, WIDTH, make_mosaics
from benchmarks.gpu.served import make_text_payloads
from penstock.tasks.images.decoding import read_header


def test_every_text_is_sent_and_the_last_request_is_filled() -> None:
    payloads = make_text_payloads([str(number) for number in range(10)], (4, 1))
    assert [payload.inputs[0].shape for payload in payloads] == [(4, 1), (1, 1), (4, 1), (1, 1)]


def test_a_mosaic_has_1080p() -> None:
    sizes = {read_header(file).image.size for file in make_mosaics()}
    assert sizes == {(WIDTH, HEIGHT)}
    assert (2 * WIDTH, 2 * HEIGHT) == (1920, 1080)


def test_the_limit_is_the_slower_of_network_and_codec() -> None:
    assert compute_image_figure([50.0], [200.0], cores=4, codec_s=0.04).value == pytest.approx(0.5)
    assert compute_image_figure([50.0], [80.0], cores=4, codec_s=0.04).value == pytest.approx(0.625)


def test_memory_taken_at_the_start_is_not_growth() -> None:
    assert compute_growth([10, 100, 100, 100, 100, 100, 100, 100]) == 0
    assert compute_growth([100, 100, 100, 100, 105, 110, 120, 120]) == pytest.approx(0.2)


def test_a_spike_in_one_window_is_shown() -> None:
    series = {"p99_ms": [5.0, 5.0, 40.0, 5.0], "memory_mib": [1.0] * 4, "device_mib": [0.0] * 4}
    found = {figure.key: figure for figure in compute_soak_figures(series)}
    assert found["gpu_soak_p99_worst_over_median"].value == 8
    assert not found["gpu_soak_p99_worst_over_median"].is_met
    assert found["gpu_soak_memory_growth"].is_met
