"""`penstock manager`, `gateway` and `worker`: one role on a host of its own, or as a part of `penstock serve`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal.cluster import (
    Advertise,
    AskKeys,
    Bind,
    ConfigFile,
    DataDir,
    HealthGrpcPort,
    HealthHost,
    HealthPort,
    Insecure,
    Join,
    KeyFile,
    Node,
    access_of,
    given,
)
from penstock.cli.terminal.output import with_readable_logs
from penstock.cli.terminal.repository import ServedModels

if TYPE_CHECKING:
    from penstock.app.process import RoleStart

Id = Annotated[str | None, typer.Option("--id", help="Its name among the roles of its kind on this host.")]
# Of a process that `serve` has started.
RunDir = Annotated[Path | None, typer.Option(hidden=True)]
TetherFd = Annotated[int | None, typer.Option("--tether", hidden=True)]


def manager(
    models: ServedModels = None,
    data_dir: DataDir = None,
    join: Annotated[str | None, typer.Option(help="The store that several managers share: etcd://HOST:PORT,…")] = None,
    node: Node = None,
    bind: Bind = None,
    advertise: Advertise = None,
    insecure: Insecure = None,
    keys: AskKeys = None,
    key_file: KeyFile = None,
    health_host: HealthHost = None,
    health_port: HealthPort = None,
    health_grpc_port: HealthGrpcPort = None,
    config: ConfigFile = None,
) -> None:
    """Run the manager of a cluster on this host."""
    from penstock.app.manager import run_manager

    start = _start(
        "manager",
        None,
        config,
        None,
        models=models,
        data_dir=data_dir,
        insecure=insecure,
        access=access_of(keys),
        api_key_file=key_file,
        cluster=given(join=join, node=node, bind=bind, advertise=advertise),
        health=given(host=health_host, http_port=health_port, grpc_port=health_grpc_port),
    )
    run_manager(start)


def worker(
    context: typer.Context,
    join: Join = None,
    node: Node = None,
    bind: Bind = None,
    advertise: Advertise = None,
    host: Annotated[
        str | None, typer.Option(help="Where clients reach it directly; loopback unless told otherwise.")
    ] = None,
    data_dir: DataDir = None,
    health_host: HealthHost = None,
    health_port: HealthPort = None,
    health_grpc_port: HealthGrpcPort = None,
    insecure: Insecure = None,
    keys: AskKeys = None,
    key_file: KeyFile = None,
    config: ConfigFile = None,
    id_: Id = None,
    run_dir: RunDir = None,
    tether: TetherFd = None,
) -> None:
    """Run one worker of a cluster on this host; or ask about a cluster's workers."""
    if context.invoked_subcommand is not None:
        return
    start = _supervised(id_, run_dir, tether) or _start(
        "worker-0",
        id_,
        config,
        tether,
        host=host,
        data_dir=data_dir,
        insecure=insecure,
        access=access_of(keys),
        api_key_file=key_file,
        cluster=given(join=join, node=node, bind=bind, advertise=advertise),
        health=given(host=health_host, http_port=health_port, grpc_port=health_grpc_port),
    )
    from penstock.app.worker import run_worker

    run_worker(start)


def gateway(
    join: Join = None,
    node: Node = None,
    bind: Bind = None,
    advertise: Advertise = None,
    host: Annotated[str | None, typer.Option(help="Where clients reach it; loopback unless told otherwise.")] = None,
    http_port: Annotated[int | None, typer.Option(help="REST, metrics and health. [default: 8080]")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC. [default: 50051]")] = None,
    insecure: Insecure = None,
    keys: AskKeys = None,
    key_file: KeyFile = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    id_: Id = None,
    run_dir: RunDir = None,
    tether: TetherFd = None,
) -> None:
    """Run one gateway of a cluster on this host."""
    if start := _supervised(id_, run_dir, tether):
        from penstock.app.gateway import run_gateway

        run_gateway(start, http_port, grpc_port)
        return
    start = _start(
        "gateway-0",
        id_,
        config,
        tether,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        insecure=insecure,
        access=access_of(keys),
        api_key_file=key_file,
        data_dir=data_dir,
        cluster=given(join=join, node=node, bind=bind, advertise=advertise),
    )
    from penstock.app.gateway import run_gateway

    run_gateway(start)


def tasks(id_: Id, run_dir: RunDir, tether: TetherFd = None) -> None:
    """Run one task worker of a server (started by `serve`)."""
    start = _supervised(id_, run_dir, tether)
    assert start is not None
    from penstock.app.task_worker import run_task_worker

    run_task_worker(start)


def _supervised(name: str | None, run_dir: Path | None, tether: int | None) -> "RoleStart | None":
    """None: it runs alone."""
    if run_dir is None:
        return None
    from penstock.manager.fleet.tether import TetheredProcess

    tethered = TetheredProcess(tether)  # before what takes long
    from penstock.app.process import RoleStart

    assert name is not None
    return RoleStart(name, tethered, run_dir=run_dir)


def _start(usual_name: str, name: str | None, file: Path | None, tether: int | None, **flags: Any) -> "RoleStart":
    from penstock.manager.fleet.tether import TetheredProcess

    tethered = TetheredProcess(tether)  # a fleet may have started it
    from penstock.app.process import RoleStart
    from penstock.core.config import load_config

    config = with_readable_logs(load_config(file, **flags))
    return RoleStart(f"{config.cluster.node_name}.{name or usual_name}", tethered, config=config)
