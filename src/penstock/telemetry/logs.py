"""Structured logs on standard error, one JSON object or one line for people each, whatever callers put into a name."""

import logging
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog

from penstock.core.config import Telemetry
from penstock.core.error_text import printable
from penstock.core.principals import KEY_PREFIX

VALUE_CHARS = 400
# What says most where it is long: tracebacks, and what a model's process said last.
LONG_CHARS = {"exception": 20_000, "traceback": 20_000, "error": 8_000, "reason": 8_000, "line": 1_100}
ITEMS = 100  # of a list
KEY = re.compile(rf"{KEY_PREFIX}[\w-]{{20,}}")


def start_logs(settings: Telemetry, **context: str) -> None:
    """`context` is on every line: the role, the worker's id."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if settings.log_format == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            bound,
            *([escape] if settings.log_format == "console" else []),  # JSON does so itself
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _LossyStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**context)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format='{"level":"%(levelname)s","event":"%(name)s"}')


def bound(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Cuts every value: names and messages may hold whatever a caller sent."""
    return {key: _cut(value, LONG_CHARS.get(key, VALUE_CHARS)) for key, value in event.items()}


def escape(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Shows control characters instead of printing them; a traceback keeps its lines."""
    return {
        key: "\n".join(map(printable, value.split("\n"))) if key == "exception" else _printable(value)
        for key, value in event.items()
    }


def _cut(value: Any, most: int) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(_cut(key, most)): _cut(each, most) for key, each in list(value.items())[:ITEMS]}
    if isinstance(value, (list, tuple)):
        return [_cut(each, most) for each in value[:ITEMS]]
    text = value if isinstance(value, str) else str(value)
    if KEY_PREFIX in text:  # as where somebody gave a key for a model's name
        text = KEY.sub(f"{KEY_PREFIX}…", text)
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _printable(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float)) else printable(str(value))


class _LossyStream:
    """Drops what cannot be written: a full disk, or a reader that left, is no reason to fail what is logged."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()
