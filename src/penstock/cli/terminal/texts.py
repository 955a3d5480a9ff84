"""Texts from arguments, a file or standard input: one a line."""

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.terminal.files import telling
from penstock.core.errors import InvalidRequest

SHOWN_CHARS = 60


def read_texts(arguments: Sequence[str], file: Path | None, what: str = "texts") -> list[str]:
    if arguments and file is not None:
        raise InvalidRequest(f"give the {what} as arguments or with --file, not both")
    if arguments:
        return list(arguments)
    if file is None and sys.stdin.isatty():
        raise InvalidRequest(f"no {what}: give them as arguments, with --file FILE, or one a line on stdin")
    where = file or "stdin"
    try:
        with telling(where, "read"):
            raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
        lines = raw.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not lines:
        raise InvalidRequest(f"{where} has no {what}: one a line is expected")
    return lines


def shorten(text: str) -> str:
    """Fits a text into one line of a terminal."""
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
