"""`penstock rerank`: documents by their relevance to a query."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.options import GRPC_ADDRESS, AsJson, GrpcAddress, Timeout
from penstock.cli.terminal.texts import read_texts, shorten
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.core.tensors import Array

CHUNK = 128  # documents in a request: far below the server's limits, and enough to fill its batches
CONCURRENCY = 4
DOCUMENTS_HELP = "The documents; none: one a line from --file or stdin."


def register(app: typer.Typer) -> None:
    app.command()(rerank)


def rerank(
    query: Annotated[str, typer.Argument(help="What is looked for.")],
    documents: Annotated[list[str] | None, typer.Argument(metavar="DOCUMENT", help=DOCUMENTS_HELP)] = None,
    file: Annotated[Path | None, typer.Option(help="A UTF-8 file with one document a line.")] = None,
    top_n: Annotated[int | None, typer.Option(min=1, help="Only so many, the best.")] = None,
    model: Annotated[str, typer.Option(help="A model that scores, or one that embeds.")] = "minilm",
    grpc: GrpcAddress = GRPC_ADDRESS,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Sort documents by their relevance to a query."""
    from penstock.client import Client
    from penstock.client.ranking import rank

    if not query.strip():
        raise InvalidRequest("the query is empty: say what is looked for")
    given = read_texts(documents or [], file, "documents")
    with Client(grpc, timeout) as client:
        ranks = rank(_score_all(client, query, given, model), top_n)
    if as_json:
        results = [{"index": index, "score": score, "document": given[index]} for index, score in ranks]
        print(json.dumps({"model": model, "results": results}))
        return
    for index, score in ranks:
        print(f"{score:+.4f}  {index:>{len(str(len(given) - 1))}}  {shorten(given[index])}")


def _score_all(client: "Client", query: str, documents: Sequence[str], model: str) -> "Array":
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from penstock.cli.terminal.progress import show_progress

    chunks = [documents[start : start + CHUNK] for start in range(0, len(documents), CHUNK)]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers: Iterator[Array] = pool.map(lambda chunk: client.score(query, chunk, model), chunks)
        try:
            return np.concatenate(list(show_progress("scoring", answers, len(chunks))))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
