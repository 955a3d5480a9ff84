"""Logs: whatever callers put into names, a line stays a line, of bounded length."""

import json
import unicodedata
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from penstock.core.config import Telemetry
from penstock.telemetry.logs import start_logs

ODD = "\x1b[31m\x1b]0;owned\x07\r\n{'forged': 1}\u2028\u2029\u202e\u2066\u200b\ufeff\x00\x7f\x9b\x85\xad\U000e0041 end"


@pytest.fixture(autouse=True)
def unbound() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def started(log_format: Any) -> Any:
    start_logs(Telemetry(log_format=log_format), role="test")
    return structlog.get_logger()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_values_are_cut(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    log, long = started(log_format), "n" * 20_000_000
    log.info(
        "asked", model=long, error=long, many=[long] * 3, named={long: long}, other=Exception(long), data=long.encode()
    )
    try:
        raise ValueError(long)
    except ValueError:
        log.exception("bug", model=long)
    assert 400 < len(capsys.readouterr().err) < 60_000


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_control_characters_are_shown(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = started(log_format)
    log.info("asked", model=ODD, many=[ODD], named={ODD: ODD}, other=Exception(ODD), size=3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert not [char for char in lines[0] if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")]
    assert "\\x1b[31m" in lines[0] or "\\u001b[31m" in lines[0]


def test_a_traceback_for_people_keeps_its_lines_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    log = started("console")
    try:
        raise ValueError(ODD)
    except ValueError:
        log.exception("bug")
    said = capsys.readouterr().err
    assert "Traceback (most recent call last):\n" in said
    assert not [char for char in said if char != "\n" and unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")]


def test_what_programs_read_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    started("json").info("loaded", model="minilm", seconds=0.5, versions=["1"], ready=True, why=None)
    found = json.loads(capsys.readouterr().err)
    assert {key: value for key, value in found.items() if key != "timestamp"} == {
        "event": "loaded",
        "level": "info",
        "role": "test",
        "model": "minilm",
        "seconds": 0.5,
        "versions": ["1"],
        "ready": True,
        "why": None,
    }
