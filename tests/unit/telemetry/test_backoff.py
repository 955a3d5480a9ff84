"""Pauses before a process that ended is restarted."""

from penstock.telemetry.backoff import Backoff


def test_the_pause_doubles_up_to_its_limit_and_a_long_run_resets_it() -> None:
    backoff = Backoff(0.1, 1.0)
    assert [round(backoff.compute_next_wait_s(0.0), 2) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.compute_next_wait_s(60.0) == 0.1


def test_the_pause_stays_at_its_limit() -> None:
    backoff = Backoff(0.1, 1.0)
    assert {backoff.compute_next_wait_s(0.0) for _ in range(2000)} == {0.1, 0.2, 0.4, 0.8, 1.0}
