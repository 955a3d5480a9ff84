"""How many lines of a model may be logged."""

from penstock.engines.hosting.output import Allowance


def test_a_burst_and_then_so_many_a_second() -> None:
    allowance = Allowance(per_s=50.0, burst=200, left=200, at=10.0)
    assert allowance.room(10.0) == 200
    allowance.take(200)
    assert allowance.room(10.0) == 0
    assert allowance.room(10.5) == 25
    allowance.take(5)
    assert allowance.room(11.0) == 45
    assert allowance.room(1000.0) == 200
