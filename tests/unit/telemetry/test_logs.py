"""Log lines stay single lines of bounded length, whatever callers send."""

import io
import json
import unicodedata
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from penstock.core.config import TelemetrySettings
from penstock.telemetry.logs import start_logs

ODD = "\x1b[31m\x1b]0;owned\x07\r\n{'forged': 1}\u2028\u2029\u202e\u2066\u200b\ufeff\x00\x7f\x9b\x85\xad\U000e0041 end"


@pytest.fixture(autouse=True)
def unbound() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def started(log_format: Any) -> Any:
    start_logs(TelemetrySettings(log_format=log_format), role="test")
    return structlog.get_logger()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_long_values_are_shortened(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_control_characters_are_escaped(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = started(log_format)
    log.info("asked", model=ODD, many=[ODD], named={ODD: ODD}, other=Exception(ODD), size=3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert not [char for char in lines[0] if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")]
    assert "\\x1b[31m" in lines[0] or "\\u001b[31m" in lines[0]


def test_a_traceback_for_people_keeps_only_its_line_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    log = started("console")
    try:
        raise ValueError(ODD)
    except ValueError:
        log.exception("bug")
    said = capsys.readouterr().err
    assert "Traceback (most recent call last):\n" in said
    assert not [char for char in said if char != "\n" and unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")]


def test_json_lines_are_not_escaped_twice(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("role", "event", "fields", "wanted"),
    [
        (
            {"role": "worker", "worker": "worker-0"},
            "loaded",
            {
                "model": "m",
                "version": "1",
                "platform": "openvino",
                "precision": "bf16",
                "device": "cpu",
                "seconds": 7.84,
            },
            "model loaded m 1 in 7.8 s on worker-0 (openvino bf16 cpu)",
        ),
        ({"role": "serve"}, "process_started", {"process": "worker-0", "pid": 7}, "process started worker-0 (pid 7)"),
        (
            {"role": "gateway", "gateway": "gateway-0"},
            "readiness_changed",
            {"ready": False, "reason": "model 'm' is gone"},
            "readiness changed on gateway-0 (not ready): model 'm' is gone",
        ),
        (
            {"role": "gateway", "gateway": "gateway-0"},
            "worker_left",
            {"worker": "w", "reason": "died"},
            "worker left w on gateway-0: died",
        ),
        (
            {"role": "serve"},
            "model_registered",
            {"model": "m", "versions": ["1", "2"]},
            "model registered m (versions 1, 2)",
        ),
    ],
)
def test_a_line_for_people_is_a_sentence(
    role: dict[str, str], event: str, fields: dict[str, Any], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logs(TelemetrySettings(log_format="console"), **role)
    structlog.get_logger().info(event, **fields)
    time, _, line = capsys.readouterr().err.rstrip("\n").partition(" ")
    assert [len(each) for each in time.split(":")] == [2, 2, 2]
    assert line == wanted


def test_a_line_for_people_names_its_level_unless_it_is_info(capsys: pytest.CaptureFixture[str]) -> None:
    started("console").warning("data_dir_unwritable", data_dir="/data", error="Read-only file system")
    line = capsys.readouterr().err.partition(" ")[2]
    assert line == "warning: data dir unwritable (data dir /data): Read-only file system\n"


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "has_colors"), [("", True), ("1", False)])
def test_no_color_turns_off_the_colours_of_lines_for_people(
    no_color: str, has_colors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr("sys.stderr", screen := _Screen())
    started("console").warning("slow")
    assert ("\x1b" in screen.getvalue()) == has_colors
