"""`penstock manager`, `gateway` and `worker`: one role on a host of its own, or as a part of `penstock serve`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal.cluster import PartOptions, runs_part, runs_part_with_health
from penstock.cli.terminal.repository import ServedModels

if TYPE_CHECKING:
    from penstock.app.process import RoleStart

Id = Annotated[str | None, typer.Option("--id", help="Its name among the roles of its kind on this host.")]
# Of a process that `serve` has started.
RunDir = Annotated[Path | None, typer.Option(hidden=True)]
TetherFd = Annotated[int | None, typer.Option("--tether", hidden=True)]


@runs_part_with_health
def manager(part: PartOptions, models: ServedModels = None) -> None:
    """Run the manager of a cluster on this host."""
    from penstock.app.manager import run_manager

    run_manager(_start("manager", None, part, None, models=models))


@runs_part_with_health
def worker(
    part: PartOptions,
    context: typer.Context,
    host: Annotated[
        str | None, typer.Option(help="Where clients reach it directly; loopback unless told otherwise.")
    ] = None,
    id_: Id = None,
    run_dir: RunDir = None,
    tether: TetherFd = None,
) -> None:
    """Run one worker of a cluster on this host; or ask about a cluster's workers."""
    if context.invoked_subcommand is not None:
        return
    start = _supervised(id_, run_dir, tether) or _start("worker-0", id_, part, tether, host=host)
    from penstock.app.worker import run_worker

    run_worker(start)


@runs_part
def gateway(
    part: PartOptions,
    host: Annotated[str | None, typer.Option(help="Where clients reach it; loopback unless told otherwise.")] = None,
    http_port: Annotated[int | None, typer.Option(help="REST, metrics and health. [default: 8080]")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC. [default: 50051]")] = None,
    id_: Id = None,
    run_dir: RunDir = None,
    tether: TetherFd = None,
) -> None:
    """Run one gateway of a cluster on this host."""
    if start := _supervised(id_, run_dir, tether):
        from penstock.app.gateway import run_gateway

        run_gateway(start, http_port, grpc_port)
        return
    start = _start("gateway-0", id_, part, tether, host=host, http_port=http_port, grpc_port=grpc_port)
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


def _start(usual_name: str, name: str | None, part: PartOptions, tether: int | None, **own: Any) -> "RoleStart":
    from penstock.manager.fleet.tether import TetheredProcess

    tethered = TetheredProcess(tether)  # a fleet may have started it
    from penstock.app.process import RoleStart

    config = part.load(**own)
    return RoleStart(f"{config.cluster.node_name}.{name or usual_name}", tethered, config=config)
