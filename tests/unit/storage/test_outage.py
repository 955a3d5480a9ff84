"""A store that is away is tried now and then."""

from penstock.storage.outage import RETRY_S, Outage


def test_while_it_is_away_one_caller_at_a_time_tries() -> None:
    outage = Outage()
    assert outage.may_try(0.0)
    assert outage.failed(0.0)
    assert not outage.failed(0.1)
    assert not outage.may_try(0.1 + RETRY_S - 0.01)
    assert outage.may_try(0.1 + RETRY_S)
    assert not outage.may_try(0.1 + RETRY_S)
    assert outage.may_try(0.1 + 2 * RETRY_S)


def test_its_beginning_and_its_end_are_told_once() -> None:
    outage = Outage()
    assert not outage.worked()
    assert outage.failed(0.0)
    assert outage.worked()
    assert not outage.worked()
    assert outage.may_try(0.0)
    assert outage.failed(1.0)
