"""The options of commands that put load on a server."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import InvalidRequest

PROTOCOLS = ("grpc", "stream", "rest")

LoadProtocol = Annotated[str, typer.Option("--protocol", help="grpc, stream (gRPC streams) or rest.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, max=4096, help="Items in a request.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="NAME:SIZES", help="The shape of a tensor that the model leaves open."),
]
MsMarco = Annotated[Path | None, typer.Option(help="Texts from MS MARCO at this path: TSV or Parquet.")]
LENGTHS = "128, a range as 64-256, normal:MEAN,DEVIATION, or a file"
PromptTokens = Annotated[
    str, typer.Option(metavar="LENGTHS", help=f"Of a model that generates text: {LENGTHS} of prompts, text or JSONL.")
]
OutputTokens = Annotated[
    str,
    typer.Option(
        metavar="LENGTHS", help="The same of its answers; 64, or, where prompts are a file's, as long as they turn out."
    ),
]
PrefixTokens = Annotated[
    int, typer.Option(min=0, max=100_000, help="Tokens that all prompts begin with, beside their own.")
]
Streams = Annotated[
    bool, typer.Option("--stream/--whole", help="How its answers come; over rest, as OpenAI's completions.")
]
Goodput = Annotated[
    str,
    typer.Option(
        metavar="BOUNDS", help="Count answers that are good, in ms: ttft:500,tpot:50,e2el:5000, or some of these."
    ),
]


def check_protocol(name: str) -> None:
    if name not in PROTOCOLS:
        raise InvalidRequest(f"--protocol {name}: there are {', '.join(PROTOCOLS)}")


def read_shapes(given: list[str] | None) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for text in given or ():
        name, _, sizes = text.rpartition(":")
        try:
            found[name] = [int(size) for size in sizes.split(",")]
        except ValueError:
            found[name] = []
        if not name or min(found[name], default=0) < 1:
            raise InvalidRequest(f"--shape {text}: expected NAME:SIZES, like x:1,256")
    return found
