"""Options of the commands that generate load."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import InvalidRequest

PROTOCOLS = ("grpc", "stream", "rest")

LoadProtocol = Annotated[
    str, typer.Option("--protocol", help="Protocol of the requests: grpc, stream (gRPC streams) or rest.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, max=4096, help="Items per request.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME:SIZES",
        help="Shape of an input with variable dimensions, such as x:1,256; may be repeated. [default: none]",
    ),
]
MsMarco = Annotated[
    Path | None, typer.Option(help="Use texts of MS MARCO from this TSV or Parquet file. [default: none]")
]
PromptTokens = Annotated[
    str,
    typer.Option(
        metavar="LENGTHS",
        help="Generated text: length of prompts in tokens: 128, 64-256 or normal:MEAN,DEVIATION; or a file with "
        "prompts (text or JSONL).",
    ),
]
OutputTokens = Annotated[
    str,
    typer.Option(
        metavar="LENGTHS",
        help="Generated text: length of answers in tokens, as for --prompt-tokens. [default: 64; unlimited if the "
        "prompts come from a file]",
    ),
]
PrefixTokens = Annotated[
    int, typer.Option(min=0, max=100_000, help="Generated text: tokens of a prefix that all prompts share.")
]
Streams = Annotated[
    bool,
    typer.Option(
        "--stream/--whole", help="Generated text: stream answers or return them whole (rest: OpenAI completions)."
    ),
]
Goodput = Annotated[
    str,
    typer.Option(
        metavar="BOUNDS",
        help="Generated text: also count the answers within these bounds in ms: ttft:500,tpot:50,e2el:5000, or some of "
        "them. [default: none]",
    ),
]


def check_protocol(name: str) -> None:
    if name not in PROTOCOLS:
        raise InvalidRequest(f"--protocol {name}: choose one of {', '.join(PROTOCOLS)}")


def read_shapes(assignments: list[str] | None) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for text in assignments or ():
        name, _, sizes = text.rpartition(":")
        try:
            found[name] = [int(size) for size in sizes.split(",")]
        except ValueError:
            found[name] = []
        if not name or min(found[name], default=0) < 1:
            raise InvalidRequest(f"--shape {text}: expected NAME:SIZES, like x:1,256")
    return found
