"""Log lines that clients cause: one per period, with a count."""

from structlog.testing import capture_logs

from penstock.telemetry.repeated_log import PERIOD_S, RepeatedLog


def test_one_line_per_period_has_the_number_of_times() -> None:
    now = 0.0
    repeated = RepeatedLog("connection_refused", lambda: now)
    with capture_logs() as lines:
        for _ in range(1000):
            repeated.add(error="too many")
        assert [line["count"] for line in lines] == [1], "the first is logged at once"
        now += PERIOD_S
        repeated.add(5, error="again")
    assert [(line["count"], line["error"]) for line in lines] == [(1, "too many"), (1004, "again")]
    assert {line["event"] for line in lines} == {"connection_refused"}
