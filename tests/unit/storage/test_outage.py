"""Attempts to reach a store during an outage."""

from penstock.storage.outage import RETRY_S, Outage


def test_during_an_outage_one_caller_at_a_time_tries() -> None:
    outage = Outage()
    assert outage.may_try(0.0)
    assert outage.record_failure(0.0)
    assert not outage.record_failure(0.1)
    assert not outage.may_try(0.1 + RETRY_S - 0.01)
    assert outage.may_try(0.1 + RETRY_S)
    assert not outage.may_try(0.1 + RETRY_S)
    assert outage.may_try(0.1 + 2 * RETRY_S)


def test_start_and_end_of_an_outage_are_reported_once() -> None:
    outage = Outage()
    assert not outage.record_success()
    assert outage.record_failure(0.0)
    assert outage.record_success()
    assert not outage.record_success()
    assert outage.may_try(0.0)
    assert outage.record_failure(1.0)
