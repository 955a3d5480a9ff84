"""`penstock embed` and `penstock rerank`: compute embeddings of texts, and sort documents by relevance."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.errors import InvalidRequest
from penstock.terminal.command_files import name_file_in_errors
from penstock.terminal.output import print_json
from penstock.terminal.request_sender import ask_in_chunks
from penstock.terminal.server_options import Server, takes_server
from penstock.terminal.shared_options import AsJson, Timeout, read_model_name
from penstock.terminal.text_arguments import read_texts, shorten

if TYPE_CHECKING:
    from penstock.core.tensors import Array

SHOWN_TEXTS, SHOWN_NUMBERS = 20, 4
DOCUMENTS_HELP = "Documents to sort. [default: one per line from --file or stdin]"


@takes_server
def embed(
    server: Server,
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts to embed. [default: one per line from --file or stdin]")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A UTF-8 file with one text per line. [default: none]")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the vectors to this .npy file. [default: none]")] = None,
    model: Annotated[str, typer.Option(callback=read_model_name, help="The embedding model.")] = "minilm",
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Compute the embeddings of texts."""
    from penstock.client import Client

    given = read_texts(texts or [], file)
    if output is not None and output.suffix != ".npy":
        raise InvalidRequest(f"--output {output}: expected a file name that ends in .npy")
    with Client(server.grpc, timeout, **server.access.options) as client:
        vectors = ask_in_chunks("embedding", lambda chunk: client.embed(chunk, model), given)
    if output is not None:
        _save_vectors(output, vectors)
    if as_json:
        found = {"output": str(output)} if output is not None else {"embeddings": vectors.tolist()}
        print_json({"model": model, "shape": list(vectors.shape), **found}, indent=None)
    elif output is not None:
        print(f"{_describe_shape(vectors)} written to {output}")
    else:
        _print_vectors(given, vectors)


def _save_vectors(file: Path, vectors: "Array") -> None:
    import numpy as np

    with name_file_in_errors(file, "written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, vectors)


def _print_vectors(texts: Sequence[str], vectors: "Array") -> None:
    print(_describe_shape(vectors))
    for text, vector in list(zip(texts, vectors, strict=True))[:SHOWN_TEXTS]:
        numbers = ", ".join(f"{number:+.4f}" for number in vector[:SHOWN_NUMBERS])
        print(f"[{numbers}, …]  {shorten(text)}")
    if len(texts) > SHOWN_TEXTS:
        print(f"… and {len(texts) - SHOWN_TEXTS} more; use --json or --output FILE.npy to get all")


def _describe_shape(vectors: "Array") -> str:
    return f"{vectors.shape[0]} × {vectors.shape[1]} {vectors.dtype}"


@takes_server
def rerank(
    server: Server,
    query: Annotated[str, typer.Argument(help="The search query.")],
    documents: Annotated[list[str] | None, typer.Argument(metavar="DOCUMENT", help=DOCUMENTS_HELP)] = None,
    file: Annotated[Path | None, typer.Option(help="A UTF-8 file with one document per line. [default: none]")] = None,
    top_n: Annotated[
        int | None, typer.Option(min=1, help="Show only this many of the best documents. [default: all]")
    ] = None,
    model: Annotated[str, typer.Option(callback=read_model_name, help="A scoring or an embedding model.")] = "minilm",
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Sort documents by their relevance to a query."""
    from penstock.client import Client
    from penstock.client.tasks import rank

    if not query.strip():
        raise InvalidRequest("the query is empty: give a text to search for")
    given = read_texts(documents or [], file, "documents")
    with Client(server.grpc, timeout, **server.access.options) as client:
        scores = ask_in_chunks("scoring", lambda chunk: client.score(query, chunk, model), given)
    ranks = rank(scores, top_n)
    if as_json:
        results = [{"index": index, "score": score, "document": given[index]} for index, score in ranks]
        print_json({"model": model, "results": results}, indent=None)
        return
    for index, score in ranks:
        print(f"{score:+.4f}  {index:>{len(str(len(given) - 1))}}  {shorten(given[index])}")
