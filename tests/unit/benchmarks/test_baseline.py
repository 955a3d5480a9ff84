"""The comparison of a benchmark run with earlier runs: only a difference beyond noise is called worse."""

import json
from pathlib import Path

import pytest

from benchmarks.suite.baseline import KEPT_RUNS, Baseline
from benchmarks.suite.figures import SuiteFigure
from penstock.core.errors import ConfigError


def figure(value: float, spread: float = 0.0, is_ceiling: bool = False) -> SuiteFigure:
    return SuiteFigure("k", value, spread, 1.0, is_ceiling, rounds=4)


def known(*values: float) -> Baseline:
    found = Baseline({})
    for value in values:
        found = found.append_run([figure(value)])
    return found


def test_noise_is_the_spread_of_the_known_runs() -> None:
    baseline = known(1.0, 0.95, 1.1)
    assert baseline.value("k") == 1.0
    (verdict,) = baseline.compare([figure(0.91)])
    assert verdict.noise == pytest.approx(0.1)
    assert not verdict.is_worse
    (verdict,) = baseline.compare([figure(0.89)])
    assert verdict.is_worse
    assert verdict.change == pytest.approx(-0.11)


def test_noisy_rounds_count_as_noise_of_the_run() -> None:
    (quiet,) = known(1.0, 1.0).compare([figure(0.9, spread=0.0)])
    (noisy,) = known(1.0, 1.0).compare([figure(0.9, spread=0.2)])
    assert quiet.is_worse
    assert noisy.noise == pytest.approx(0.2)
    assert not noisy.is_worse


def test_a_higher_value_is_worse_for_a_ceiling() -> None:
    baseline = Baseline({}).append_run([figure(2.0, is_ceiling=True)])
    assert baseline.compare([figure(2.2, is_ceiling=True)])[0].is_worse
    assert not baseline.compare([figure(1.0, is_ceiling=True)])[0].is_worse


def test_a_better_run_is_never_worse_and_an_unknown_figure_is_ignored() -> None:
    assert not known(1.0).compare([figure(5.0)])[0].is_worse
    assert known(1.0).compare([SuiteFigure("new", 1.0, 0.0, 1.0)]) == []


def test_the_file_keeps_the_last_runs(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    baseline = known(*(1.0 + n / 100 for n in range(KEPT_RUNS + 2)))
    baseline.write(file)
    runs = json.loads(file.read_text())["figures"]["k"]["runs"]
    assert [run["value"] for run in runs] == [1.02 + n / 100 for n in range(KEPT_RUNS)]
    assert Baseline.read(file).value("k") == baseline.value("k")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": {"k": {"runs": [{"value": 0, "error": 0}]}}}'])
def test_a_broken_file_says_what_to_do(tmp_path: Path, text: str) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--update-baseline"):
        Baseline.read(file)
    with pytest.raises(ConfigError, match="no baseline"):
        Baseline.read(tmp_path / "absent.json")
