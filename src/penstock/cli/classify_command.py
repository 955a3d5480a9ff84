"""`penstock classify`: classify images, texts or arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.errors import InvalidRequest, PenstockError, Unavailable
from penstock.terminal.command_files import read_array, read_bytes
from penstock.terminal.output import escape_controls, print_json
from penstock.terminal.request_sender import ask_all, exit_with_problems
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import AsJson, Timeout, read_model_name
from penstock.terminal.text_arguments import shorten

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.client.tasks import Items, Labels

CONCURRENCY = 2
FILES_HELP = "JPEG or PNG files; for a model that takes an array, .npy files with one item per row. [default: none]"


@dataclass(frozen=True, slots=True)
class ClassifiedItem:
    input: Path | str  # a file or a text
    rows: "Sequence[Labels]" = ()  # labels with scores, one row per item: an array can have several rows
    problem: str = ""

    @property
    def name(self) -> str:
        return str(self.input) if isinstance(self.input, Path) else shorten(self.input)


@takes_server
def classify(
    server: Server,
    model: Annotated[str, typer.Option(callback=read_model_name, help="A model with the task classify.")],
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help=FILES_HELP)] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option("--text", help="A text to classify instead of files; may be repeated. [default: none]"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Number of labels to return. [default: the model's setting]")
    ] = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Classify images or texts.

    Give files (`classify FILE... --model NAME`) or texts (`classify --text TEXT --model NAME`).
    """
    from penstock.client import Client

    if bool(files) == bool(texts):
        raise InvalidRequest("give either files to classify or texts with --text")
    items: Sequence[Path | str] = files or texts or []
    with Client(server.grpc, timeout, **server.access.options) as client:
        found = ask_all("classifying", lambda item: _classify_one(client, item, model, top_k), items, CONCURRENCY)
    if as_json:
        print_json([_to_json(item) for item in found])
    else:
        for item in found:
            _print_labels(item)
    problems = [item for item in found if item.problem]
    exit_with_problems(
        item.problem if item.problem.startswith(item.name) else f"{item.name}: {item.problem}" for item in problems
    )


def _classify_one(client: "Client", item: Path | str, model: str, top_k: int | None) -> ClassifiedItem:
    """Classify one item. Return a failure as the result's problem, but raise `Unavailable`, which ends the command."""
    try:
        return ClassifiedItem(item, client.classify(_read_item(item), model, top_k))
    except Unavailable:
        raise
    except PenstockError as error:
        return ClassifiedItem(item, problem=error.message)


def _read_item(item: Path | str) -> "Items":
    if isinstance(item, str):
        return [item]
    return read_array(item) if item.suffix == ".npy" else [read_bytes(item)]


def _to_json(item: ClassifiedItem) -> dict[str, object]:
    facts: dict[str, object] = {"input": str(item.input)}
    if item.problem:
        return facts | {"problem": item.problem}
    rows = [[{"label": label, "score": score} for label, score in row] for row in item.rows]
    return facts | ({"labels": rows[0]} if len(rows) == 1 else {"rows": rows})


def _print_labels(item: ClassifiedItem) -> None:
    for number, row in enumerate(item.rows):
        mark = f" [{number}]" if len(item.rows) > 1 else ""
        print(f"{item.name}{mark}: " + ", ".join(f"{escape_controls(label)} {score:.4f}" for label, score in row))
