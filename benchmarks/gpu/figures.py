"""The figures of a run on a GPU: served rates as shares of the bare device and codec, and the growth in a soak test."""

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.suite.figures import SuiteFigure, ratio

LATE = 0.25  # share of a soak test's windows that is compared at its beginning and end


def compute_text_figure(served: Sequence[float], raw: Sequence[float]) -> SuiteFigure:
    return ratio("gpu_text_over_raw", served, raw, 0.8)


def compute_image_figure(served: Sequence[float], raw: Sequence[float], cores: int, codec_s: float) -> SuiteFigure:
    """Compute served images as a share of the limit: the bare network, or the cores' bare codec if slower."""
    return ratio("gpu_image_over_limit", served, [min(rate, cores / codec_s) for rate in raw], 0.7)


def compute_soak_figures(series: Mapping[str, Sequence[float]]) -> list[SuiteFigure]:
    """Return the growth over a SoakSeries.

    The first quarter is left out, because one-time allocations are no growth.
    """
    p99 = series["p99_ms"]
    typical = median(p99)
    return [
        SuiteFigure("gpu_soak_memory_growth", compute_growth(series["memory_mib"]), 0.0, 0.02, is_ceiling=True),
        SuiteFigure("gpu_soak_device_growth", compute_growth(series["device_mib"]), 0.0, 0.01, is_ceiling=True),
        SuiteFigure("gpu_soak_p99_worst_over_median", max(p99) / typical if typical else 0.0, 0.0, 2.0, True),
    ]


def compute_growth(values: Sequence[float]) -> float:
    """Return the growth from the second quarter to the last, as a share."""
    part = max(1, int(len(values) * LATE))
    before, after = median(values[part : 2 * part]), median(values[-part:])
    return after / before - 1 if before else 0.0
