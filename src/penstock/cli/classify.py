"""`penstock classify`: images, texts or arrays to labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.files import read_array, read_bytes
from penstock.cli.terminal.options import GRPC_ADDRESS, AsJson, GrpcAddress, Timeout
from penstock.cli.terminal.output import plain, print_json
from penstock.cli.terminal.requests import ask_all, exit_with_problems
from penstock.cli.terminal.texts import shorten
from penstock.core.errors import InvalidRequest, PenstockError, Unavailable

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.client.tasks import Items, Labels

AT_ONCE = 2
FILES_HELP = "JPEG or PNG files; .npy files for a model that takes an array, one row an item."


@dataclass(frozen=True, slots=True)
class Classified:
    input: Path | str  # a file, or the text itself
    rows: "Sequence[Labels]" = ()  # one, but for an array of several
    problem: str = ""

    @property
    def name(self) -> str:
        return str(self.input) if isinstance(self.input, Path) else shorten(self.input)


@shows_key
def classify(
    access: Access,
    model: Annotated[str, typer.Option(help="The model; it does the task classify.")],
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help=FILES_HELP)] = None,
    texts: Annotated[list[str] | None, typer.Option("--text", help="A text in place of files; repeat it.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="So many labels; else as the model has it.")] = None,
    grpc: GrpcAddress = GRPC_ADDRESS,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Tell what images or texts are: `classify FILE...`, or `classify --text TEXT`."""
    from penstock.client import Client

    if bool(files) == bool(texts):
        raise InvalidRequest("give the files to classify, or texts with --text, and not both")
    items: Sequence[Path | str] = files or texts or []
    with Client(grpc, timeout, **access.options) as client:
        found = ask_all("classifying", lambda item: _classify_one(client, item, model, top_k), items, AT_ONCE)
    if as_json:
        print_json([_as_json(item) for item in found])
    else:
        for item in found:
            _print(item)
    problems = [item for item in found if item.problem]
    exit_with_problems(
        item.problem if item.problem.startswith(item.name) else f"{item.name}: {item.problem}" for item in problems
    )


def _classify_one(client: "Client", item: Path | str, model: str, top_k: int | None) -> Classified:
    """One that fails does not stop the others, but a server that is away does."""
    try:
        return Classified(item, client.classify(_read(item), model, top_k))
    except Unavailable:
        raise
    except PenstockError as error:
        return Classified(item, problem=error.message)


def _read(item: Path | str) -> "Items":
    if isinstance(item, str):
        return [item]
    return read_array(item) if item.suffix == ".npy" else [read_bytes(item)]


def _as_json(item: Classified) -> dict[str, object]:
    facts: dict[str, object] = {"input": str(item.input)}
    if item.problem:
        return facts | {"problem": item.problem}
    rows = [[{"label": label, "score": score} for label, score in row] for row in item.rows]
    return facts | ({"labels": rows[0]} if len(rows) == 1 else {"rows": rows})


def _print(item: Classified) -> None:
    for number, row in enumerate(item.rows):
        mark = f" [{number}]" if len(item.rows) > 1 else ""
        print(f"{item.name}{mark}: " + ", ".join(f"{plain(label)} {score:.4f}" for label, score in row))
