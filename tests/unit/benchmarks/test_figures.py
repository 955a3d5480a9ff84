"""Bars of a run's figures."""

import pytest

from benchmarks.processors import processors
from benchmarks.suite.figures import choose_auto_bar, compute
from benchmarks.suite.measure import LoadRow
from penstock.telemetry.machine import read_processor_features

TEXT = ("mixed grpc", "mixed stream", "mixed rest", "mixed arrival-32", "mixed as shipped")


@pytest.mark.parametrize(
    ("features", "bar"), [({"avx2", "amx_bf16"}, 1.5), ({"avx512_bf16"}, 1.5), ({"avx512f", "bf16"}, 1.0), (set(), 1.0)]
)
def test_the_bar_of_the_engine_choice_depends_on_the_processor(features: set[str], bar: float) -> None:
    assert choose_auto_bar(features) == bar


def test_the_shipped_model_is_compared_with_onnx_runtime() -> None:
    rows = {name: LoadRow(64, [100.0] * 3) for name in TEXT} | {"mixed as shipped": LoadRow(64, [160.0] * 3)}
    found = {figure.key: figure for figure in compute(rows, [110.0] * 3, lambda group: group == "text")}
    auto = found["auto_over_onnx_fp32"]
    assert (auto.value, auto.bar) == (1.6, choose_auto_bar(read_processor_features()))


def test_processors_of_the_load_generator_and_the_engine_are_named() -> None:
    named = processors()
    assert named.keys() == {"load_generator", "engine"}
    assert all(name.endswith(", no BF16") or "BF16 (" in name for name in named.values())
