"""Progress without a terminal is lines on standard error."""

from collections.abc import Iterator

import pytest

from penstock.terminal import progress


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PERIOD_S", 0.0)


def test_items_counts_and_bytes_are_reported_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.show_progress("checking", iter("ab"), 2)) == ["a", "b"]
    with progress.show_count("streaming", 3) as count:
        count()
    with progress.show_bytes("pushing", 2**21) as sent:
        sent(2**20)
    assert capsys.readouterr().err.splitlines() == [
        "penstock: checking: 1 of 2",
        "penstock: checking: 2 of 2",
        "penstock: streaming: 1 of 3",
        "penstock: pushing: 1 MiB of 2 MiB",
    ]


def test_a_task_prints_at_most_one_line_per_period(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PERIOD_S", 3600.0)

    def items() -> Iterator[int]:
        yield from range(5)

    assert list(progress.show_progress("checking", items(), 5)) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_each_step_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PERIOD_S", 3600.0)
    with progress.show_steps("quantizing m") as show_step:
        show_step("measuring")
    assert capsys.readouterr().err == "penstock: quantizing m: measuring\n"
