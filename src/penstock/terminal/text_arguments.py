"""Read a command's texts from arguments, or line by line from a file or standard input."""

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import InvalidRequest
from penstock.terminal.command_files import name_file_in_errors

SHOWN_CHARS = 60


def read_texts(arguments: Sequence[str], file: Path | None, what: str = "texts") -> list[str]:
    if arguments and file is not None:
        raise InvalidRequest(f"give the {what} either as arguments or with --file")
    if arguments:
        return list(arguments)
    if file is None and sys.stdin.isatty():
        raise InvalidRequest(f"no {what}: give them as arguments, with --file FILE, or one per line on stdin")
    where = file or "stdin"
    try:
        with name_file_in_errors(where, "read"):
            raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
        lines = raw.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not lines:
        raise InvalidRequest(f"{where}: no {what}; expected one per line")
    return lines


def shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
