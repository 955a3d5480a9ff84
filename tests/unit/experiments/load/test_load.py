"""The load generator's counts."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.suite.figures import SuiteFigure, ratio
from benchmarks.suite.measure import LoadRow
from penstock.experiments.load.drivers import Rejected
from penstock.experiments.load.latencies import PERCENTILES, Latencies
from penstock.experiments.load.load_process import (
    ContinuousLoad,
    Window,
    WindowOutcome,
    merge_outcomes,
    read_messages,
    write_messages,
)
from penstock.experiments.load.steady import has_enough_windows, is_steady, measured
from penstock.models.convert.speed import spread


class Counting:
    """A connection that answers after one turn of the loop and refuses every fifth request."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.inside = self.most_inside = 0

    async def open(self, concurrency: int) -> None: ...

    async def call(self, slot: int, number: int) -> None:
        self.numbers.append(number)
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        await asyncio.sleep(0.001)
        self.inside -= 1
        if number % 5 == 0:
            raise Rejected("FULL")

    async def close(self) -> None: ...


async def test_closed_loop_keeps_its_concurrency_and_counts_every_request_once() -> None:
    driver = Counting()
    load = ContinuousLoad(driver, Window(0.4, concurrency=7, warm_up_s=0.05, most=2), first=100)
    outcomes = [outcome async for outcome in load.windows()]
    assert len(outcomes) == 2
    assert driver.most_inside == 7
    assert driver.inside == 0
    assert sorted(driver.numbers) == list(range(100, 100 + load.sent))
    assert 0 < sum(outcome.answered for outcome in outcomes) < load.sent
    for outcome in outcomes:
        assert outcome.rejected["FULL"] > 0
        assert len(outcome.latencies) == outcome.answered
        assert outcome.sent > 0


async def test_open_loop_keeps_its_rate_whatever_the_answers_are() -> None:
    driver = Counting()
    load = ContinuousLoad(driver, Window(0.5, concurrency=4, rate=400), first=0)
    outcomes = [outcome async for outcome in load.windows()]
    assert load.sent == len(driver.numbers)
    assert 100 < load.sent < 320  # Poisson with a mean of 200
    assert outcomes[0].answered + outcomes[0].rejected["FULL"] <= load.sent


async def test_open_loop_measures_latency_from_the_intended_time() -> None:
    class Stalling(Counting):
        async def call(self, slot: int, number: int) -> None:
            if not self.numbers:
                import time

                time.sleep(0.2)  # noqa: ASYNC251 (the generator itself stalls)
            await super().call(slot, number)

    load = ContinuousLoad(Stalling(), Window(0.5, rate=200), first=1)
    (outcome,) = [outcome async for outcome in load.windows()]
    # Requests that were due during the stall waited for its end, although they were sent later.
    assert outcome.latencies.percentile_ms(90) > 50


async def test_load_ends_early_if_stopped() -> None:
    load = ContinuousLoad(Counting(), Window(0.05, concurrency=2, most=1000))
    found = 0
    async for _ in load.windows():
        found += 1
        if found == 3:
            load.stop()
    assert found == 3


def test_results_of_several_processes_are_merged() -> None:
    parts = [
        WindowOutcome(2.0, 10, {"A": 1}, Latencies([0.001] * 10), 11, 0.5),
        WindowOutcome(2.0, 30, {"A": 2, "B": 1}, Latencies([0.003] * 30), 33, 1.5),
    ]
    whole = merge_outcomes([WindowOutcome.from_json(part.to_json()) for part in parts])
    assert (whole.rps, whole.rejected, whole.sent, whole.processes) == (20.0, {"A": 3, "B": 1}, 44, 2)
    assert whole.cpu_share == pytest.approx(0.5)  # two seconds of CPU in two seconds on two cores
    assert whole.latencies.percentile_ms(10) == pytest.approx(1, rel=0.002)
    assert whole.latencies.percentile_ms(50) == pytest.approx(3, rel=0.002)


def test_latencies_are_exact_to_a_thousandth_and_missing_ones_are_nan() -> None:
    latencies = Latencies(n / 1000 for n in range(1, 1001))
    for percent in PERCENTILES:
        assert latencies.summary_ms()[f"p{percent:g}"] == pytest.approx(percent * 10, rel=0.002)
    assert latencies.highest_ms == pytest.approx(1000, rel=0.002)
    assert Latencies().percentile_ms(50) != Latencies().percentile_ms(50)


def window(rps: float, ms: float = 1.0) -> WindowOutcome:
    return WindowOutcome(1.0, int(rps), {}, Latencies([ms / 1000] * int(rps)))


def test_three_windows_that_agree_are_stable() -> None:
    assert not is_steady([window(100), window(100)])
    assert is_steady([window(100), window(105), window(95)])
    assert not is_steady([window(100), window(100), window(130)])
    assert not is_steady([window(100, 1), window(100, 1), window(100, 2)])  # latencies count, too
    assert is_steady([window(500), window(100), window(105), window(95)])


def test_an_unstable_load_is_marked_and_shows_the_last_three_windows() -> None:
    found = measured([window(900), window(100), window(200), window(300)])
    assert not found.is_steady
    assert found.rps == 200
    assert found.spread == pytest.approx(0.5)


def test_a_load_that_is_only_refused_ends() -> None:
    assert has_enough_windows([WindowOutcome(1.0, 0, {"NOT_FOUND": 9})])
    assert not has_enough_windows([WindowOutcome(1.0, 1, {"NOT_FOUND": 9})])


def test_messages_survive_encoding(tmp_path: Path) -> None:
    messages = [b"", b"a\n\x00", b"x" * 100_000]
    assert read_messages(write_messages(tmp_path / "m", messages)) == messages
    with pytest.raises(ValueError, match="no requests"):
        read_messages(write_messages(tmp_path / "none", []))


def test_the_spread_is_relative() -> None:
    assert spread([10.0, 10.0, 12.0]) == pytest.approx(0.2)


def test_a_row_divides_cpu_time_by_the_requests_sent() -> None:
    row = LoadRow(1)
    row.add(WindowOutcome(seconds=2.0, answered=10, latencies=Latencies([0.1]), sent=20, cpu_s=0.2), {"gateway": 0.4})
    assert row.rps == [5.0]
    assert row.cpu_ms == {"gateway": [20.0], "load": [10.0]}


def test_a_figure_is_the_median_of_the_ratios_per_round() -> None:
    figure = ratio("k", [2.0, 4.0, 9.0], [1.0, 2.0, 3.0], bar=2.0)
    assert figure == SuiteFigure("k", 2.0, 0.5, 2.0, rounds=3)
    assert figure.is_met
    assert not ratio("k", [3.0], [1.0], bar=2.0, is_ceiling=True).is_met
