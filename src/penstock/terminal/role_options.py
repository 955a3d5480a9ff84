"""Options that the commands for the roles of a cluster share, and the configuration that results from them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.terminal.access import with_options
from penstock.terminal.output import with_readable_logs

if TYPE_CHECKING:
    from penstock.core.config import Config

Join = Annotated[
    str | None,
    typer.Option(
        help="Cluster to join: manager addresses HOST[:PORT],… or the managers' store etcd://HOST:PORT,… "
        "(managers need the store). [default: none]"
    ),
]
Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="Allow other machines to connect without authentication.")
]
RequireKeys = Annotated[
    bool | None, typer.Option("--keys", help="Require an API key from every caller; see `penstock key create`.")
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file", help="File containing the API key to send to other roles. [default: variable PENSTOCK_API_KEY]"
    ),
]
ConfigFile = Annotated[Path | None, typer.Option(help="YAML configuration file. [default: none]")]


class RoleOptions(NamedTuple):
    """The values of the options that every role of a cluster has, as a configuration file and as settings."""

    file: Path | None
    flags: dict[str, Any]

    def load(self, **own: Any) -> "Config":
        from penstock.core.config import load_config

        return with_readable_logs(load_config(self.file, **self.flags, **own))


def takes_role_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that every role has to a command, which gets their values as its first argument."""

    def run(
        join: Join = None,
        node: Annotated[
            str | None, typer.Option(help="Name of this host in the cluster. [default: the machine's host name]")
        ] = None,
        bind: Annotated[
            str | None,
            typer.Option(help="HOST[:PORT] to listen on for the roles of other hosts. [default: this host only]"),
        ] = None,
        advertise: Annotated[
            str | None, typer.Option(help="HOST[:PORT] that other hosts connect to. [default: --bind]")
        ] = None,
        insecure: Insecure = None,
        keys: RequireKeys = None,
        key_file: KeyFile = None,
        data_dir: Annotated[
            Path | None, typer.Option(help="Folder for the state of the server. [default: ./penstock-data]")
        ] = None,
        config: ConfigFile = None,
        **options: Any,
    ) -> None:
        cluster = section(join=join, node=node, bind=bind, advertise=advertise)
        flags = {"insecure": insecure, "data_dir": data_dir, "cluster": cluster, **make_access_flags(keys, key_file)}
        command(RoleOptions(config, flags), **options)

    return with_options(command, run)


def takes_role_options_with_health(command: Callable[..., None]) -> Callable[..., None]:
    """Like `takes_role_options`, with the options of the health endpoints."""

    def run(
        role: RoleOptions,
        health_host: Annotated[
            str | None, typer.Option(help="Address for the health endpoints. [default: loopback]")
        ] = None,
        health_port: Annotated[
            int | None,
            typer.Option(
                help="Port for /healthz, /readyz and /metrics. [default: the role's usual port, or a free one]"
            ),
        ] = None,
        health_grpc_port: Annotated[
            int | None,
            typer.Option(help="Port for gRPC's health service. [default: the role's usual port, or a free one]"),
        ] = None,
        **options: Any,
    ) -> None:
        role.flags["health"] = section(host=health_host, http_port=health_port, grpc_port=health_grpc_port)
        command(role, **options)

    return takes_role_options(with_options(command, run))


def make_access_flags(keys: bool | None, key_file: Path | None) -> dict[str, Any]:
    return {"access": {"keys": "required"} if keys else None, "api_key_file": key_file}


def section(**flags: Any) -> dict[str, Any] | None:
    """Return a section of the configuration with the flags that are set, or None if no flag is set."""
    return {name: value for name, value in flags.items() if value is not None} or None
