"""Structured logs on standard error: one line per event, as JSON or for people, safe against callers' input."""

import logging
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict

from penstock.core.config import TelemetrySettings, is_color_allowed
from penstock.core.error_text import escape_control_characters
from penstock.core.principals import KEY_PREFIX

VALUE_CHARS = 400
# Fields that may be long because their end matters: tracebacks, and the last output of a model's process.
LONG_CHARS = {"exception": 20_000, "traceback": 20_000, "error": 8_000, "reason": 8_000, "line": 1_100}
ITEMS = 100  # of a list
KEY = re.compile(rf"{KEY_PREFIX}[\w-]{{20,}}")
COLORS = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
RESET = "\x1b[0m"
# Words for events whose names alone are not clear.
WORDS = {"loaded": "model loaded", "unloaded": "model unloaded", "event": "recorded"}
SUBJECTS = ("kind", "process", "model", "version", "subject")  # shown without their names
ROLES = ("worker", "gateway", "manager")
PLACE = ("platform", "precision", "device")  # where a model runs
REASONS = ("reason", "error", "advice", "text", "line")  # at the end, after a colon
UNSHOWN = frozenset(
    ("event", "level", "timestamp", "role", "exception", "seconds", *SUBJECTS, *ROLES, *PLACE, *REASONS)
)


class ConsoleLines:
    """A structlog processor that renders one event as a line."""

    def __init__(self, has_colors: bool) -> None:
        self._has_colors = has_colors

    def __call__(self, logger: object, method: str, event: EventDict) -> str:
        level = event["level"]
        mark = "" if level == "info" else f"{level}: "
        if mark and self._has_colors and level in COLORS:
            mark = f"{COLORS[level]}{mark}{RESET}"
        lines = event["exception"].split("\n") if "exception" in event else ()  # a traceback keeps its line breaks
        return "\n".join(
            [
                f"{event['timestamp']} {mark}{escape_control_characters(format_sentence(event))}",
                *map(escape_control_characters, lines),
            ]
        )


def format_sentence(event: EventDict) -> str:
    """Return an event's line, such as `model loaded minilm 1 in 7.8 s on worker-0 (openvino bf16 cpu, why start)`."""
    name = str(event["event"])
    parts = [WORDS.get(name, name.replace("_", " "))]
    parts += [str(event[key]) for key in SUBJECTS if event.get(key)]
    if "seconds" in event:
        parts.append(f"in {event['seconds']:.1f} s")
    # A process logs its own name with its role; another process is a subject of the event.
    own = event.get("role")
    parts += [f"{'on ' if key == own else ''}{event[key]}" for key in ROLES if event.get(key)]
    place = " ".join(str(event[key]) for key in PLACE if event.get(key))
    rest = [_format_field(key, value) for key, value in event.items() if key not in UNSHOWN and _is_given(value)]
    details = ", ".join(filter(None, [place, *rest]))
    text = " ".join(parts) + (f" ({details})" if details else "")
    return ": ".join([text, *(str(event[key]) for key in REASONS if event.get(key))])


def _is_given(value: object) -> bool:
    return value is not None and value != "" and value != []


def _format_field(key: str, value: object) -> str:
    words = key.replace("_", " ")
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    if isinstance(value, bool):
        return words if value else f"not {words}"
    return f"{words} {value}"


def start_logs(settings: TelemetrySettings, **context: str) -> None:
    """Configure logging. `context` is added to every line: the role, the worker's id."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    is_console = settings.log_format == "console"
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if is_console else "iso", utc=not is_console)
    console = ConsoleLines(has_colors=sys.stderr.isatty() and is_color_allowed())
    renderer = console if is_console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            stamp,
            structlog.processors.format_exc_info,
            shorten_values,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _LossyStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**context)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format='{"level":"%(levelname)s","event":"%(name)s"}')


def shorten_values(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Shorten every value, because names and messages may contain long texts that a caller sent."""
    return {key: _shorten_value(value, LONG_CHARS.get(key, VALUE_CHARS)) for key, value in event.items()}


def _shorten_value(value: Any, max_chars: int) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {
            str(_shorten_value(key, max_chars)): _shorten_value(each, max_chars)
            for key, each in list(value.items())[:ITEMS]
        }
    if isinstance(value, (list, tuple)):
        return [_shorten_value(each, max_chars) for each in value[:ITEMS]]
    text = value if isinstance(value, str) else str(value)
    if KEY_PREFIX in text:  # a caller may have sent a key in a wrong place, such as a model's name
        text = KEY.sub(f"{KEY_PREFIX}…", text)
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"


class _LossyStream:
    """Drops log lines that cannot be written, so that a full disk or a closed pipe fails no request."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()
