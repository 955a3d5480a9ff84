"""The options that several commands share."""

from typing import Annotated

import typer

GRPC_ADDRESS = "127.0.0.1:50051"
HTTP_ADDRESS = "127.0.0.1:8080"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
GrpcAddress = Annotated[
    str, typer.Option("--grpc", metavar="HOST:PORT", help="The server's gRPC address, grpcs://… for TLS.")
]
HttpAddress = Annotated[
    str, typer.Option("--http", metavar="URL", help="The server's HTTP address, https://… for TLS.")
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds that one request may take.")]
