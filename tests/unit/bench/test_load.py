"""The load generator counts what it says it counts."""

import asyncio

import pytest

from penstock.bench.drivers import Rejected
from penstock.bench.figures import Figure, ratio
from penstock.bench.load import Outcome, Window, run_closed, run_open
from penstock.bench.measure import Row, percentiles_ms, spread
from penstock.bench.payloads import build
from penstock.pb.inference import grpc_service_pb2 as pb


class Counting:
    """Answers after a turn of the loop; refuses every fifth request."""

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
    outcome = await run_closed(driver, Window(0.2, concurrency=7, warm_up_s=0.05), first=100)
    assert driver.most_inside == 7
    assert sorted(driver.numbers) == list(range(100, 100 + outcome.sent))
    assert 0 < outcome.answered < outcome.sent
    assert outcome.rejected["FULL"] == sum(1 for number in driver.numbers if number % 5 == 0)
    assert len(outcome.latencies_s) == outcome.answered


async def test_open_loop_sends_at_its_rate_whatever_is_answered() -> None:
    driver = Counting()
    outcome = await run_open(driver, Window(0.5, concurrency=4, rate=400), first=0)
    assert outcome.sent == len(driver.numbers) == outcome.answered + outcome.rejected["FULL"]
    assert 100 < outcome.sent < 320  # Poisson with a mean of 200


def test_percentiles_and_spread() -> None:
    assert percentiles_ms([n / 1000 for n in range(101)]) == {50: 50.0, 95: 95.0, 99: 99.0}
    assert spread([10.0, 10.0, 12.0]) == pytest.approx(0.2)


def test_a_row_divides_cpu_by_what_was_sent() -> None:
    row = Row("x", 1)
    row.add(Outcome(seconds=2.0, answered=10, latencies_s=[0.1], sent=20, cpu_s=0.2), {"gateway": 0.4})
    assert row.rps == [5.0]
    assert row.cpu_ms == {"gateway": [20.0], "load": [10.0]}


def test_a_figure_is_the_median_of_the_rounds_ratios() -> None:
    figure = ratio("k", [2.0, 4.0, 9.0], [1.0, 2.0, 3.0], bar=2.0)
    assert figure == Figure("k", 2.0, 0.5, 2.0)
    assert figure.is_met
    assert not ratio("k", [3.0], [1.0], bar=2.0, is_ceiling=True).is_met


@pytest.mark.parametrize("kind", ["noop", "mixed", "queries", "passages", "photos"])
def test_payloads_are_the_same_request_over_grpc_and_rest(kind: str) -> None:
    payload = build(kind, "m")[0]
    message = pb.ModelInferRequest.FromString(payload.grpc())
    assert message.model_name == "m"
    assert message.raw_input_contents[0] == payload.data
    head, _, body = payload.rest().partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert body.endswith(payload.data)


def test_an_id_appended_to_a_built_message_is_its_id() -> None:
    message = build("noop", "m")[0].grpc() + b"\x1a\x03abc"
    assert pb.ModelInferRequest.FromString(message).id == "abc"
