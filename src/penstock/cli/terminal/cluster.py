"""Options of the commands that run a part of a cluster."""

from pathlib import Path
from typing import Annotated, Any

import typer

Join = Annotated[
    str | None,
    typer.Option(help="The managers to join, HOST[:PORT] with commas between them, or etcd://HOST:PORT,…"),
]
Node = Annotated[str | None, typer.Option(help="This host's name in the cluster. [default: the machine's own]")]
Bind = Annotated[str | None, typer.Option(help="HOST[:PORT] where other hosts' roles reach this one.")]
Advertise = Annotated[str | None, typer.Option(help="HOST[:PORT] that they are told, where it is not --bind.")]
Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="Listen where other machines reach it, without authentication.")
]
AskKeys = Annotated[
    bool | None, typer.Option("--keys", help="Ask every caller for a key; `penstock key create` makes them.")
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--key-file", help="A file with the key to show to others. [default: PENSTOCK_API_KEY]"),
]
DataDir = Annotated[Path | None, typer.Option(help="Embedded storage.")]
ConfigFile = Annotated[Path | None, typer.Option(help="A YAML file with any setting.")]
HealthHost = Annotated[str | None, typer.Option(help="Where it says how it is; loopback unless told otherwise.")]
HealthPort = Annotated[int | None, typer.Option(help="The same over HTTP: /healthz, /readyz, /metrics.")]
HealthGrpcPort = Annotated[int | None, typer.Option(help="The same as gRPC's health service.")]


def access_of(keys: bool | None) -> dict[str, Any] | None:
    return {"keys": "required"} if keys else None


def given(**flags: Any) -> dict[str, Any] | None:
    """A section of the configuration, with the flags that were given."""
    return {name: value for name, value in flags.items() if value is not None} or None
