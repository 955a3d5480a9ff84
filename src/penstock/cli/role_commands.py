"""`penstock manager`, `gateway`, `worker` and `directory`: run one role."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.terminal.repository_options import ServedModels, Watch
from penstock.terminal.role_options import (
    ConfigFile,
    Insecure,
    RequireKeys,
    RoleOptions,
    make_access_flags,
    section,
    takes_role_options,
    takes_role_options_with_health,
)

if TYPE_CHECKING:
    from penstock.app.role_process import RoleStart

Id = Annotated[
    str | None, typer.Option("--id", help="Name of this role, unique on this host. [default: gateway-0 or worker-0]")
]
DIRECTORY_DATA = Path("penstock-directory")
# `penstock serve` and fleets pass these to the processes that they start.
RunDir = Annotated[Path | None, typer.Option(hidden=True)]
TetherFd = Annotated[int | None, typer.Option("--tether", hidden=True)]


@takes_role_options_with_health
def manager(role: RoleOptions, models: ServedModels = None, watch: Watch = None) -> None:
    """Run the manager of a cluster on this host."""
    from penstock.app.manager_role import run_manager

    run_manager(_make_start("manager", None, role, None, models=models, watch=watch))


@takes_role_options_with_health
def worker(
    role: RoleOptions,
    context: typer.Context,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on for direct client connections. [default: loopback]")
    ] = None,
    id_: Id = None,
    run_dir: RunDir = None,
    tether: TetherFd = None,
) -> None:
    """Run a worker of a cluster, or manage its workers."""
    if context.invoked_subcommand is not None:
        return
    start = _supervised_start(id_, run_dir, tether) or _make_start("worker-0", id_, role, tether, host=host)
    from penstock.app.worker_role import run_worker

    run_worker(start)


@takes_role_options
def gateway(
    role: RoleOptions,
    host: Annotated[str | None, typer.Option(help="Address to listen on for clients. [default: loopback]")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port for REST, metrics and health. [default: 8080]")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port for gRPC. [default: 50051]")] = None,
    id_: Id = None,
    run_dir: RunDir = None,
    tether: TetherFd = None,
) -> None:
    """Run a gateway of a cluster on this host."""
    if start := _supervised_start(id_, run_dir, tether):
        from penstock.app.gateway.gateway_role import run_gateway

        run_gateway(start, http_port, grpc_port)
        return
    start = _make_start("gateway-0", id_, role, tether, host=host, http_port=http_port, grpc_port=grpc_port)
    from penstock.app.gateway.gateway_role import run_gateway

    run_gateway(start)


def directory(
    context: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: loopback]")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port to listen on. [default: 7450, or a free one]")] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Store of the records, such as mongodb://HOST/NAME. [default: sqlite:///directory.db]"),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder for records and keys. [default: ./penstock-directory]")
    ] = None,
    insecure: Insecure = None,
    keys: RequireKeys = None,
    health_host: Annotated[
        str | None, typer.Option(help="Address for the health endpoints. [default: loopback]")
    ] = None,
    health_port: Annotated[
        int | None, typer.Option(help="Port for /healthz, /readyz and /metrics. [default: 7440, or a free one]")
    ] = None,
    health_grpc_port: Annotated[
        int | None, typer.Option(help="Port for gRPC's health service. [default: 7441, or a free one]")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Serve a directory of inference servers, or query one."""
    if context.invoked_subcommand is not None:
        return
    from penstock.app.directory_role import run_directory
    from penstock.app.role_process import RoleStart
    from penstock.manager.fleet.tether import TetheredProcess

    flags = {
        "host": host,
        "insecure": insecure,
        "data_dir": data_dir,
        "directory": section(http_port=http_port, store=store),
        "health": section(host=health_host, http_port=health_port, grpc_port=health_grpc_port),
        **make_access_flags(keys, None),
    }
    found = RoleOptions(config, flags).load()
    if "data_dir" not in found.model_fields_set:
        found = found.model_copy(update={"data_dir": DIRECTORY_DATA})
    run_directory(RoleStart("directory", TetheredProcess(None), config=found))


def _supervised_start(name: str | None, run_dir: Path | None, tether: int | None) -> "RoleStart | None":
    """Return the options with which `penstock serve` started this process, or None if a user started it."""
    if run_dir is None:
        return None
    from penstock.manager.fleet.tether import TetheredProcess

    tethered = TetheredProcess(tether)  # before the slow imports, so that the process always ends with its parent
    from penstock.app.role_process import RoleStart

    assert name is not None
    return RoleStart(name, tethered, run_dir=run_dir)


def _make_start(default_name: str, name: str | None, role: RoleOptions, tether: int | None, **own: Any) -> "RoleStart":
    from penstock.manager.fleet.tether import TetheredProcess

    tethered = TetheredProcess(tether)  # set by a fleet, with which the process then ends
    from penstock.app.role_process import RoleStart

    config = role.load(**own)
    return RoleStart(f"{config.cluster.node_name}.{name or default_name}", tethered, config=config)
