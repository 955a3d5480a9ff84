"""Commands that run a part of a cluster: the options that they share, and the configuration that these make."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.terminal.access import with_options
from penstock.cli.terminal.output import with_readable_logs

if TYPE_CHECKING:
    from penstock.core.config import Config

Join = Annotated[
    str | None,
    typer.Option(
        help="The store that the managers share, etcd://HOST:PORT,…; of all but managers also the managers themselves, "
        "HOST[:PORT] with commas between them."
    ),
]
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
ConfigFile = Annotated[Path | None, typer.Option(help="A YAML file with any setting.")]


class PartOptions(NamedTuple):
    """What the options say that every part of a cluster has."""

    file: Path | None
    flags: dict[str, Any]

    def load(self, **own: Any) -> "Config":
        from penstock.core.config import load_config

        return with_readable_logs(load_config(self.file, **self.flags, **own))


def runs_part(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of every part of a cluster, and what they say as its first argument."""

    def run(
        join: Join = None,
        node: Annotated[
            str | None, typer.Option(help="This host's name in the cluster. [default: the machine's own]")
        ] = None,
        bind: Annotated[str | None, typer.Option(help="HOST[:PORT] where other hosts' roles reach this one.")] = None,
        advertise: Annotated[
            str | None, typer.Option(help="HOST[:PORT] that they are told, where it is not --bind.")
        ] = None,
        insecure: Insecure = None,
        keys: AskKeys = None,
        key_file: KeyFile = None,
        data_dir: Annotated[Path | None, typer.Option(help="Embedded storage.")] = None,
        config: ConfigFile = None,
        **options: Any,
    ) -> None:
        cluster = given(join=join, node=node, bind=bind, advertise=advertise)
        flags = {"insecure": insecure, "data_dir": data_dir, "cluster": cluster, **access_flags(keys, key_file)}
        command(PartOptions(config, flags), **options)

    return with_options(command, run)


def runs_part_with_health(command: Callable[..., None]) -> Callable[..., None]:
    """The same of one that has a door of its own to say how it is."""

    def run(
        part: PartOptions,
        health_host: Annotated[
            str | None, typer.Option(help="Where it says how it is; loopback unless told otherwise.")
        ] = None,
        health_port: Annotated[
            int | None, typer.Option(help="The same over HTTP: /healthz, /readyz, /metrics.")
        ] = None,
        health_grpc_port: Annotated[int | None, typer.Option(help="The same as gRPC's health service.")] = None,
        **options: Any,
    ) -> None:
        part.flags["health"] = given(host=health_host, http_port=health_port, grpc_port=health_grpc_port)
        command(part, **options)

    return runs_part(with_options(command, run))


def access_flags(keys: bool | None, key_file: Path | None) -> dict[str, Any]:
    return {"access": {"keys": "required"} if keys else None, "api_key_file": key_file}


def given(**flags: Any) -> dict[str, Any] | None:
    """A section of the configuration, with the flags that were given."""
    return {name: value for name, value in flags.items() if value is not None} or None
