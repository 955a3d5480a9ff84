"""Tables fit the width of the terminal, and names are never cut."""

import pytest

from penstock.terminal.output import print_rows

TITLES = ("block", "model", "state", "workers", "reason")
ROW = ("blk-0123456789ab", "a-model-with-a-long-name", "failed", "host-with-a-name.worker-0", "it failed " * 12)


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_a_table_fits_and_keeps_every_name_whole(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_rows(TITLES, [ROW, (*ROW[:3], "", "")], "nothing")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    for name in ROW[:4]:
        assert any(name in line for line in lines), f"{name} is cut"
    assert "…" not in "".join(lines)


def test_a_table_without_rows_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(TITLES, [], "no block is deployed")
    assert capsys.readouterr().out == "no block is deployed\n"


def test_a_column_without_values_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_rows(("model", "state", "reason"), [("a", "ready", ""), ("bb", "failed", "")], "nothing")
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "model  state",
        "a      ready",
        "bb     failed",
    ]
