"""When a process that ended is started again."""

from penstock.core.backoff import Backoff


def test_it_doubles_to_its_bound_and_a_long_life_resets_it() -> None:
    backoff = Backoff(0.1, 1.0)
    assert [round(backoff.died(0.0), 2) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.died(60.0) == 0.1


def test_it_stays_at_its_bound_however_often_a_process_ends() -> None:
    backoff = Backoff(0.1, 1.0)
    assert {backoff.died(0.0) for _ in range(2000)} == {0.1, 0.2, 0.4, 0.8, 1.0}
