"""What commands print to standard output: tables that do not wrap in a pipe, plain lines, JSON."""

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(piped_width: int = 140) -> "Console":
    """`piped_width`: columns where the output is no terminal's."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else piped_width, highlight=False)


def print_json(value: object, indent: int | None = 2) -> None:
    print(json.dumps(value, indent=indent))
