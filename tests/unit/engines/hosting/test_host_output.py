"""The limit on a model's log lines."""

from penstock.engines.hosting.host_output import Allowance


def test_a_burst_is_logged_and_then_a_number_of_lines_per_second() -> None:
    allowance = Allowance(per_s=50.0, burst=200, remaining=200, refilled_at=10.0)
    assert allowance.refill(10.0) == 200
    allowance.spend(200)
    assert allowance.refill(10.0) == 0
    assert allowance.refill(10.5) == 25
    allowance.spend(5)
    assert allowance.refill(11.0) == 45
    assert allowance.refill(1000.0) == 200
