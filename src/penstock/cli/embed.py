"""`penstock embed`: texts to vectors."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.access import Access, shows_key
from penstock.cli.terminal.files import telling
from penstock.cli.terminal.options import GRPC_ADDRESS, AsJson, GrpcAddress, Timeout
from penstock.cli.terminal.output import print_json
from penstock.cli.terminal.requests import ask_in_chunks
from penstock.cli.terminal.texts import read_texts, shorten
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.core.tensors import Array

SHOWN_TEXTS, SHOWN_NUMBERS = 20, 4


@shows_key
def embed(
    access: Access,
    texts: Annotated[list[str] | None, typer.Argument(help="The texts; none: one a line from --file or stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="A UTF-8 file with one text a line.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the vectors to this .npy file.")] = None,
    model: Annotated[str, typer.Option(help="The embedding model.")] = "minilm",
    grpc: GrpcAddress = GRPC_ADDRESS,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Turn texts into vectors."""
    from penstock.client import Client

    given = read_texts(texts or [], file)
    if output is not None and output.suffix != ".npy":
        raise InvalidRequest(f"{output}: --output writes NumPy's format; give it a name that ends in .npy")
    with Client(grpc, timeout, **access.options) as client:
        vectors = ask_in_chunks("embedding", lambda chunk: client.embed(chunk, model), given)
    if output is not None:
        _save(output, vectors)
    if as_json:
        found = {"output": str(output)} if output is not None else {"embeddings": vectors.tolist()}
        print_json({"model": model, "shape": list(vectors.shape), **found}, indent=None)
    elif output is not None:
        print(f"{_shape(vectors)} written to {output}")
    else:
        _print_vectors(given, vectors)


def _save(file: Path, vectors: "Array") -> None:
    import numpy as np

    with telling(file, "written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, vectors)


def _print_vectors(texts: Sequence[str], vectors: "Array") -> None:
    print(_shape(vectors))
    for text, vector in list(zip(texts, vectors, strict=True))[:SHOWN_TEXTS]:
        numbers = ", ".join(f"{number:+.4f}" for number in vector[:SHOWN_NUMBERS])
        print(f"[{numbers}, …]  {shorten(text)}")
    if len(texts) > SHOWN_TEXTS:
        print(f"… and {len(texts) - SHOWN_TEXTS} more; --json or --output FILE.npy gives all")


def _shape(vectors: "Array") -> str:
    return f"{vectors.shape[0]} × {vectors.shape[1]} {vectors.dtype}"
