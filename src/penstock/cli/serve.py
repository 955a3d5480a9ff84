"""`penstock serve`, and the roles that it starts as processes of their own."""

from pathlib import Path
from typing import Annotated

import typer

Id = Annotated[str, typer.Option("--id", help="Its name in the cluster, stable over restarts.")]
RunDir = Annotated[Path, typer.Option(help="The folder of the running server that it belongs to.")]


def register(app: typer.Typer) -> None:
    app.command()(serve)
    app.command(hidden=True)(worker)
    app.command(hidden=True)(gateway)


def serve(
    models: Annotated[Path | None, typer.Option(help="The model repository: a folder of model folders.")] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen; loopback unless told otherwise.")] = None,
    http_port: Annotated[int | None, typer.Option(help="REST, metrics and health. [default: 8080]")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC. [default: 50051]")] = None,
    gateways: Annotated[int | None, typer.Option(help="Gateway processes that share the ports.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; each holds every model.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Embedded storage.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with any setting.")] = None,
) -> None:
    """Serve a folder of models on this machine."""
    from penstock.app import run_serve
    from penstock.core.config import load_config

    run_serve(
        load_config(
            config,
            models=models,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            gateways=gateways,
            workers=workers,
            data_dir=data_dir,
        )
    )


def worker(id_: Id, run_dir: RunDir) -> None:
    """Run one worker of a server (started by `serve`)."""
    from penstock.app import Places, run_worker

    run_worker(id_, Places(run_dir))


def gateway(id_: Id, run_dir: RunDir, http_port: int = 8080, grpc_port: int = 50051) -> None:
    """Run one more gateway of a server (started by `serve`)."""
    from penstock.app import Places, run_gateway

    run_gateway(id_, http_port, grpc_port, Places(run_dir))
