"""`penstock classify`: images, texts or arrays to labels."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.options import GRPC_ADDRESS, AsJson, GrpcAddress, Timeout
from penstock.cli.terminal.texts import shorten
from penstock.core.errors import InvalidRequest, PenstockError, Unavailable

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.client.labels import Items, Labels

CONCURRENCY = 2
FILES_HELP = "JPEG or PNG files; .npy files for a model that takes an array, one row an item."


@dataclass(frozen=True, slots=True)
class Done:
    input: Path | str  # a file, or the text itself
    rows: "Sequence[Labels]" = ()  # one, but for an array of several
    problem: str = ""

    @property
    def name(self) -> str:
        return str(self.input) if isinstance(self.input, Path) else shorten(self.input)


def register(app: typer.Typer) -> None:
    app.command()(classify)


def classify(
    model: Annotated[str, typer.Option(help="The model; it does the task classify.")],
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help=FILES_HELP)] = None,
    texts: Annotated[list[str] | None, typer.Option("--text", help="A text in place of files; repeat it.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="So many labels; else as the model has it.")] = None,
    grpc: GrpcAddress = GRPC_ADDRESS,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Tell what images or texts are: `classify FILE...`, or `classify --text TEXT`."""
    from penstock.cli.terminal.progress import show_progress
    from penstock.client import Client

    if bool(files) == bool(texts):
        raise InvalidRequest("give the files to classify, or texts with --text, and not both")
    items: Sequence[Path | str] = files or texts or []
    with Client(grpc, timeout) as client:
        done = list(show_progress("classifying", _run(client, items, model, top_k), len(items)))
    if as_json:
        print(json.dumps([_as_json(item) for item in done], indent=2))
    for item in done:
        if item.problem:
            mark = "" if item.problem.startswith(item.name) else f"{item.name}: "
            print(f"penstock: {mark}{item.problem}", file=sys.stderr)
        elif not as_json:
            _print(item)
    if any(item.problem for item in done):
        sys.exit(2)


def _run(client: "Client", items: Sequence[Path | str], model: str, top_k: int | None) -> Iterator[Done]:
    """In the order of `items`; one that fails does not stop the others, but a server that is away does."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        try:
            yield from pool.map(lambda item: _classify_one(client, item, model, top_k), items)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _classify_one(client: "Client", item: Path | str, model: str, top_k: int | None) -> Done:
    try:
        return Done(item, client.classify(_read(item), model, top_k))
    except Unavailable:
        raise
    except PenstockError as error:
        return Done(item, problem=error.message)


def _read(item: Path | str) -> "Items":
    if isinstance(item, str):
        return [item]
    try:
        return _read_array(item) if item.suffix == ".npy" else [item.read_bytes()]
    except OSError as error:
        raise InvalidRequest(f"{item}: cannot be read: {error.strerror or error}") from error


def _read_array(file: Path) -> "Items":
    import numpy as np

    try:
        return np.asarray(np.load(file, allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise InvalidRequest(f"{file}: is not a NumPy file of plain numbers: {error}") from error


def _as_json(item: Done) -> dict[str, object]:
    facts: dict[str, object] = {"input": str(item.input)}
    if item.problem:
        return facts | {"problem": item.problem}
    rows = [[{"label": label, "score": score} for label, score in row] for row in item.rows]
    return facts | ({"labels": rows[0]} if len(rows) == 1 else {"rows": rows})


def _print(item: Done) -> None:
    for number, row in enumerate(item.rows):
        mark = f" [{number}]" if len(item.rows) > 1 else ""
        print(f"{item.name}{mark}: " + ", ".join(f"{label} {score:.4f}" for label, score in row))
