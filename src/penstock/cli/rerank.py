"""`penstock rerank`: documents by their relevance to a query."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.options import GRPC_ADDRESS, AsJson, GrpcAddress, Timeout
from penstock.cli.terminal.output import print_json
from penstock.cli.terminal.requests import ask_in_chunks
from penstock.cli.terminal.texts import read_texts, shorten
from penstock.core.errors import InvalidRequest

DOCUMENTS_HELP = "The documents; none: one a line from --file or stdin."


@shows_key
def rerank(
    access: Access,
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
    from penstock.client.tasks import rank

    if not query.strip():
        raise InvalidRequest("the query is empty: say what is looked for")
    given = read_texts(documents or [], file, "documents")
    with Client(grpc, timeout, **access.options) as client:
        scores = ask_in_chunks("scoring", lambda chunk: client.score(query, chunk, model), given)
    ranks = rank(scores, top_n)
    if as_json:
        results = [{"index": index, "score": score, "document": given[index]} for index, score in ranks]
        print_json({"model": model, "results": results}, indent=None)
        return
    for index, score in ranks:
        print(f"{score:+.4f}  {index:>{len(str(len(given) - 1))}}  {shorten(given[index])}")
