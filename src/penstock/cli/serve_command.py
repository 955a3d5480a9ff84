"""`penstock serve`: run all roles on one machine, or add a machine to a cluster."""

import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.terminal.progress import show_steps
from penstock.terminal.repository_options import ServedModels, Watch
from penstock.terminal.role_options import RoleOptions, section, takes_role_options_with_health

if TYPE_CHECKING:
    from penstock.app.local_server import ReadyServer
    from penstock.core.config import Config
    from penstock.models.default_models import DefaultModels

EXAMPLES = 3


@takes_role_options_with_health
def serve(
    role: RoleOptions,
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Folder with the models, like --models. [default: none]")
    ] = None,
    models: ServedModels = None,
    watch: Watch = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on for clients. [default: loopback]")] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Additional host name that HTTP requests may use; may be repeated. [default: none]"),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose web pages may call this server; may be repeated. [default: none]"),
    ] = None,
    allow_shared_memory: Annotated[
        bool | None,
        typer.Option("--allow-shared-memory", help="Let clients on this machine pass tensors in shared memory."),
    ] = None,
    http_port: Annotated[int | None, typer.Option(help="Port for REST, metrics and health. [default: 8080]")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port for gRPC. [default: 50051]")] = None,
    gateways: Annotated[
        int | None, typer.Option(help="Number of gateway processes; they share the ports. [default: 1]")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Number of worker processes. [default: 1]")] = None,
    directory: Annotated[
        str | None, typer.Option(metavar="URL", help="Directory to register this server with. [default: none]")
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL of this server for clients, for the directory. [default: none]"),
    ] = None,
) -> None:
    """Serve a folder of models, or join a cluster.

    With --join, this machine runs gateways and workers for the managers of the cluster.
    """
    from penstock.app.local_server import run_serve
    from penstock.models.default_models import DefaultModels, with_default_models

    if folder is not None and models is not None:
        raise InvalidRequest(f"{folder} and --models {models} both name a folder with models: give one of them")
    config = role.load(
        models=models or folder,
        watch=watch,
        host=host,
        allowed_hosts=allowed_host or None,
        allowed_origins=allowed_origin or None,
        allow_shared_memory=allow_shared_memory,
        http_port=http_port,
        grpc_port=grpc_port,
        gateways=gateways,
        workers=workers,
        directory=section(url=directory, public_url=public_url),
    )
    # A machine that joins a cluster serves the models that the managers assign, not those of a local folder.
    found = DefaultModels(config) if config.cluster.join else with_default_models(config, show_steps)
    if not config.cluster.join:
        _check_folder(found.config.models)
    run_serve(found.config, partial(_log_warnings, found), partial(_announce, found))


def _check_folder(folder: Path) -> None:
    from penstock.models.folder import is_model

    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder of models; name another folder with `penstock serve FOLDER`, or create "
            "one as docs/models.md shows"
        )
    if is_model(folder):
        raise ConfigError(
            f"{folder} is a model, not a folder of models: serve the folder that contains it, with "
            f"`penstock serve {shlex.quote(str(folder.parent))}`"
        )


def _log_warnings(default_models: "DefaultModels") -> None:
    import structlog

    config = default_models.config
    if default_models.advice:
        structlog.get_logger().warning("weights_missing", advice=default_models.advice)
    if not config.is_local and config.insecure and not config.expects_keys:
        advice = f"No authentication: everybody who reaches {config.host} can use this server"
        structlog.get_logger().warning("insecure", advice=advice)


def _announce(default_models: "DefaultModels", server: "ReadyServer") -> None:
    """Print the addresses of a server that is ready, and examples; log them if standard error is not a terminal."""
    import structlog

    examples = list_examples(server)
    if not server.blocks and not default_models.config.cluster.join:
        advice = "docs/models.md shows how to make a model; `penstock model load NAME` serves it"
        structlog.get_logger().warning("no_models", folder=str(default_models.config.models), advice=advice)
    dashboard, reference = f"{server.http}/", f"{server.http}/docs"
    if not sys.stderr.isatty():
        structlog.get_logger().info("server_ready", dashboard=dashboard, api_reference=reference, examples=examples)
        return
    served = "the models of its cluster" if default_models.config.cluster.join else default_models.config.models
    lines = [
        "",
        f"Penstock is ready. It serves {served} at {server.http} (HTTP) and {server.grpc} (gRPC).",
        f"    Dashboard:     {dashboard}",
        f"    API reference: {reference}",
        "Try in another terminal:",
        *(f"    {line}" for line in (*list_preparations(default_models.config, server), *examples)),
        "Press Ctrl-C to stop.",
        "",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)


def list_preparations(config: "Config", server: "ReadyServer") -> list[str]:
    """Return the shell commands that must run before the examples."""
    programs = Path(sys.prefix) / "bin"
    has_environment = (programs / "activate").is_file()
    lines = []
    if has_environment and shutil.which("penstock") != str(programs / "penstock"):
        here = Path.cwd()
        shown = programs.relative_to(here) if programs.is_relative_to(here) else programs
        lines.append(f"source {shlex.quote(str(shown / 'activate'))}")
    lines.append(f"export PENSTOCK_SERVER={server.http}")
    if config.tls.cert and config.tls.ca:
        lines.append(f"export PENSTOCK_TLS__CA={shlex.quote(str(Path(config.tls.ca).absolute()))}")
    if server.asks_for_keys:
        lines.append("export PENSTOCK_API_KEY=psk_…    # from: penstock key create app")
    return lines


def list_examples(server: "ReadyServer") -> list[str]:
    """Return three commands that the server can answer."""
    from penstock.models.check.sample_requests import example_command, sample_inputs
    from penstock.tasks.built_in import load_description

    blocks = [block for block in server.blocks if not block.settings.is_decoupled]
    commands = [
        example_command(block, sample_inputs(block.inputs, block.max_batch_size > 0))
        for block in blocks
        if block.is_described or load_description(block.settings.task).example
    ]
    loads = [f"penstock bench {shlex.quote(block.model)}" for block in blocks if block.is_described]
    return [*commands, *loads, "penstock status", "penstock top", "penstock cluster status"][:EXAMPLES]
