"""Standard output of commands: tables that do not wrap in a pipe, lines and JSON."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.error_text import escape_control_characters

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from penstock.core.config import Config

T = TypeVar("T")
MIN_TEXT = 24  # columns for the last, wrapping column of a table
GAP = 2  # columns between two columns of a table


def with_readable_logs(config: "Config") -> "Config":
    """Return the configuration with readable logs if standard error is a terminal, unless it sets the log format."""
    if not sys.stderr.isatty() or "log_format" in config.telemetry.model_fields_set:
        return config
    return config.model_copy(update={"telemetry": config.telemetry.model_copy(update={"log_format": "console"})})


def make_console(piped_width: int = 140) -> "Console":
    """Return a console. `piped_width` is its width without a terminal, unless the environment sets COLUMNS."""
    from rich.console import Console

    from penstock.core.config import is_output_width_set

    is_known = sys.stdout.isatty() or is_output_width_set()
    return Console(width=None if is_known else piped_width, highlight=False)


def escape_controls(value: Any) -> Any:
    """Escape control characters in the strings of a server's answer, because a terminal would interpret them."""
    if isinstance(value, str):
        return escape_control_characters(value)
    if isinstance(value, dict):
        return {escape_controls(key): escape_controls(each) for key, each in value.items()}
    return [escape_controls(each) for each in value] if isinstance(value, list) else value


def print_json(value: object, indent: int | None = 2) -> None:
    print(json.dumps(value, indent=indent))


def print_list(
    is_json: bool, found: Sequence[T], titles: Sequence[str], row: Callable[[T], Sequence[object]], nothing: str
) -> None:
    """Print items as JSON or as a table. `nothing` is the text for an empty table."""
    if is_json:
        print_json(found)
    else:
        print_rows(titles, map(row, found), nothing)


def print_rows(titles: Sequence[str], rows: Iterable[Sequence[object]], nothing: str) -> None:
    shown = list(rows)
    console = make_console()
    console.print(lay_out(console, titles, shown) if shown else nothing)


def lay_out(console: "Console", titles: Sequence[str], rows: Iterable[Sequence[object]]) -> "RenderableType":
    """Return a table without empty columns, whose last column may wrap.

    If the other columns are too wide for the console, return each row as a list of fields instead.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    cells = [[str(escape_controls(cell)) for cell in row] for row in rows]
    kept = [index for index in range(len(titles)) if index == 0 or any(row[index] for row in cells)]
    titles, cells = [titles[index] for index in kept], [[row[index] for index in kept] for row in cells]
    columns = [[title, *(row[index] for row in cells)] for index, title in enumerate(titles)]
    widths = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]
    left = console.width - sum(widths[:-1]) - GAP * (len(widths) - 1)
    if left < min(widths[-1], MIN_TEXT):
        return Text("\n".join(line for row in cells for line in _list_fields(titles, row, console.width)))
    table = Table(box=None, pad_edge=False)
    for index, title in enumerate(titles):
        is_last = index == len(titles) - 1
        table.add_column(title, no_wrap=not is_last, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))  # Text does not interpret markup
    return table


def _list_fields(titles: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """Return lines with a row's first cell, and then its other fields, which are not split between lines."""
    lines, line = [row[0]], ""
    for title, cell in zip(titles[1:], row[1:], strict=True):
        field = f"{' '.join(title.split())} {cell}".strip()
        if not cell:
            continue
        if line and len(line) + len(field) + 4 > width:
            lines.append(line)
            line = ""
        line = f"{line}  {field}" if line else f"  {field}"
    return [*lines, line] if line else lines
