"""`penstock serve`, and the roles that it starts as processes of their own."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.progress import show_steps
from penstock.cli.terminal.repository import ServedModels

if TYPE_CHECKING:
    from penstock.core.config import Config
    from penstock.models.default_models import DefaultModels

Id = Annotated[str, typer.Option("--id", help="Its name in the cluster, stable over restarts.")]
RunDir = Annotated[Path, typer.Option(help="The folder of the running server that it belongs to.")]

Tether = Annotated[int | None, typer.Option(help="The inherited socket of the supervisor that it ends with.")]


def serve(
    models: ServedModels = None,
    host: Annotated[str | None, typer.Option(help="Where to listen; loopback unless told otherwise.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen where other machines reach it, without authentication.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A further name that clients call this server by; may be repeated.")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may call this server; may be repeated.")
    ] = None,
    allow_shared_memory: Annotated[
        bool | None, typer.Option("--allow-shared-memory", help="Let clients of this machine share memory with it.")
    ] = None,
    http_port: Annotated[int | None, typer.Option(help="REST, metrics and health. [default: 8080]")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC. [default: 50051]")] = None,
    gateways: Annotated[int | None, typer.Option(help="Gateway processes that share the ports.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; each holds every model.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Embedded storage.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with any setting.")] = None,
) -> None:
    """Serve a folder of models on this machine."""
    from penstock.app.serve import run_serve
    from penstock.core.config import load_config
    from penstock.models.default_models import with_default_models

    loaded = load_config(
        config,
        models=models,
        host=host,
        insecure=insecure,
        allowed_hosts=allowed_host or None,
        allowed_origins=allowed_origin or None,
        allow_shared_memory=allow_shared_memory,
        http_port=http_port,
        grpc_port=grpc_port,
        gateways=gateways,
        workers=workers,
        data_dir=data_dir,
    )
    found = with_default_models(_with_readable_logs(loaded), show_steps)
    run_serve(found.config, on_listening=lambda http, grpc: _welcome(found, http, grpc))


def _with_readable_logs(config: "Config") -> "Config":
    """People get lines to read, everything else JSON, unless the configuration chooses."""
    if not sys.stderr.isatty() or "log_format" in config.telemetry.model_fields_set:
        return config
    return config.model_copy(update={"telemetry": config.telemetry.model_copy(update={"log_format": "console"})})


def _welcome(found: "DefaultModels", http: str, grpc: str) -> None:
    open_to = "" if found.config.is_local else f"Whoever reaches {found.config.host} may use it: no authentication"
    if not sys.stderr.isatty():
        import structlog

        if found.advice:
            structlog.get_logger().warning("model_left_out", advice=found.advice)
        if open_to:
            structlog.get_logger().warning("insecure", advice=open_to)
        return
    example = "upscale photo.jpg larger.png" if found.advice else 'embed "What a penstock does"'
    lines = [
        f"Penstock serves {found.config.models} at {http} and, for gRPC, at {grpc}. Try, in another terminal:",
        f"    penstock {example} --grpc {grpc}",
        f"    penstock status --http {http}",
        *([f"Warning: {open_to}."] if open_to else []),
        *([found.advice + "."] if found.advice else []),
        "Ctrl-C stops it.",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)


def worker(id_: Id, run_dir: RunDir, tether: Tether = None) -> None:
    """Run one worker of a server (started by `serve`)."""
    from penstock.app.tether import TetheredProcess

    tethered = TetheredProcess(tether)  # before what takes long
    from penstock.app.places import ServerPlaces
    from penstock.app.worker import run_worker

    run_worker(id_, ServerPlaces(run_dir), tethered)


def tasks(id_: Id, run_dir: RunDir, tether: Tether = None) -> None:
    """Run one task worker of a server (started by `serve`)."""
    from penstock.app.tether import TetheredProcess

    tethered = TetheredProcess(tether)
    from penstock.app.places import ServerPlaces
    from penstock.app.task_worker import run_task_worker

    run_task_worker(id_, ServerPlaces(run_dir), tethered)


def gateway(id_: Id, run_dir: RunDir, http_port: int = 8080, grpc_port: int = 50051, tether: Tether = None) -> None:
    """Run one gateway of a server (started by `serve`)."""
    from penstock.app.tether import TetheredProcess

    tethered = TetheredProcess(tether)
    from penstock.app.gateway import run_gateway
    from penstock.app.places import ServerPlaces

    run_gateway(id_, http_port, grpc_port, ServerPlaces(run_dir), tethered)
