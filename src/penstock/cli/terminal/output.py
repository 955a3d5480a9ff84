"""What commands print to standard output: tables that do not wrap in a pipe, plain lines, JSON."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.error_text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.core.config import Config

T = TypeVar("T")


def with_readable_logs(config: "Config") -> "Config":
    """People get lines to read, everything else JSON, unless the configuration chooses."""
    if not sys.stderr.isatty() or "log_format" in config.telemetry.model_fields_set:
        return config
    return config.model_copy(update={"telemetry": config.telemetry.model_copy(update={"log_format": "console"})})


def make_console(piped_width: int = 140) -> "Console":
    """`piped_width`: columns where the output is no terminal's."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else piped_width, highlight=False)


def plain(value: Any) -> Any:
    """What a server said, with the control characters in its texts shown: a terminal would act on them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def print_json(value: object, indent: int | None = 2) -> None:
    print(json.dumps(value, indent=indent))


def print_list(
    is_json: bool, found: Sequence[T], titles: Sequence[str], row: Callable[[T], Sequence[object]], nothing: str
) -> None:
    """`nothing`: what is said in place of an empty table."""
    if is_json:
        print_json(found)
    else:
        print_rows(titles, map(row, found), nothing)


def print_rows(titles: Sequence[str], rows: Iterable[Sequence[object]], nothing: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*titles)
    for row in rows:
        table.add_row(*(Text(str(plain(cell))) for cell in row))  # as text: none of it is markup
    make_console().print(table if table.rows else nothing)
