"""`penstock serve`: all roles on one machine, or one machine more in a cluster."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.cluster import PartOptions, runs_part_with_health
from penstock.cli.terminal.progress import show_steps
from penstock.cli.terminal.repository import ServedModels

if TYPE_CHECKING:
    from penstock.models.default_models import DefaultModels


@runs_part_with_health
def serve(
    part: PartOptions,
    models: ServedModels = None,
    host: Annotated[str | None, typer.Option(help="Where to listen; loopback unless told otherwise.")] = None,
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
    workers: Annotated[int | None, typer.Option(help="Worker processes.")] = None,
) -> None:
    """Serve a folder of models on this machine, or add this machine to a cluster (--join)."""
    from penstock.app.serve import run_serve
    from penstock.models.default_models import DefaultModels, with_default_models

    readable = part.load(
        models=models,
        host=host,
        allowed_hosts=allowed_host or None,
        allowed_origins=allowed_origin or None,
        allow_shared_memory=allow_shared_memory,
        http_port=http_port,
        grpc_port=grpc_port,
        gateways=gateways,
        workers=workers,
    )
    # What a machine that joins serves, its managers say.
    found = DefaultModels(readable) if readable.cluster.join else with_default_models(readable, show_steps)
    run_serve(found.config, on_listening=lambda http, grpc: _welcome(found, http, grpc))


def _welcome(found: "DefaultModels", http: str, grpc: str) -> None:
    is_open = not found.config.is_local and found.config.insecure and not found.config.has_keys
    open_to = f"Whoever reaches {found.config.host} may use it: no authentication" if is_open else ""
    if not sys.stderr.isatty():
        import structlog

        if found.advice:
            structlog.get_logger().warning("model_left_out", advice=found.advice)
        if open_to:
            structlog.get_logger().warning("insecure", advice=open_to)
        return
    example = "upscale photo.jpg larger.png" if found.advice else 'embed "What a penstock does"'
    served = "the models of its cluster" if found.config.cluster.join else found.config.models
    trusting = f" --ca {found.config.tls.ca}" if found.config.tls.cert and found.config.tls.ca else ""
    lines = [
        f"Penstock serves {served} at {http} and, for gRPC, at {grpc}. Try, in another terminal:",
        f"    penstock {example} --grpc {grpc}{trusting}",
        f"    penstock status --http {http}{trusting}",
        *([f"Warning: {open_to}."] if open_to else []),
        *([found.advice + "."] if found.advice else []),
        "Ctrl-C stops it.",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)
