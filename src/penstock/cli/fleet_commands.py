"""`penstock fleet`: run gateways and workers on a Ray cluster."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.terminal.output import print_json, print_rows
from penstock.terminal.role_options import ConfigFile, Insecure, Join, RequireKeys, make_access_flags, section
from penstock.terminal.shared_options import AsJson

Address = Annotated[str, typer.Option(help="HOST:PORT of the Ray cluster's head, or auto.")]
FleetName = Annotated[str, typer.Option("--name", help="Name of the fleet; its roles are called NAME.worker-0 etc.")]
DrainS = Annotated[float, typer.Option(min=0, help="Seconds that running requests get to finish before a role stops.")]


def up(
    join: Join = None,
    address: Address = "auto",
    name: FleetName = "ray",
    gateways: Annotated[int, typer.Option(min=0, help="Minimum number of gateways.")] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Minimum number of workers.")] = 1,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs to reserve for each worker.")] = 1.0,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs to reserve for each worker.")] = 0.0,
    resource: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=AMOUNT of a custom resource to reserve for each worker; may be repeated. [default: none]"
        ),
    ] = None,
    gateway_cpus: Annotated[float, typer.Option(min=0, help="CPUs to reserve for each gateway.")] = 1.0,
    gateway_resource: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=AMOUNT of a custom resource to reserve for each gateway; may be repeated. [default: none]"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address that gateways listen on. [default: their node's address]")] = "",
    http_port: Annotated[
        int | None, typer.Option(help="Gateways' port for REST, metrics and health; 0: any free port. [default: 8080]")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Gateways' port for gRPC; 0: any free port. [default: 50051]")
    ] = None,
    insecure: Insecure = None,
    keys: RequireKeys = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            help="File containing the API key that roles send; its path on every node. "
            "[default: PENSTOCK_API_KEY on the node]",
        ),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Start gateways and workers that join a cluster. Roles that already run keep running."""
    from penstock.app.fleet_control import FleetPlan, parse_resources, start_fleet
    from penstock.core.config import load_config
    from penstock.manager.fleet.role_processes import RoleResources

    flags = {"http_port": http_port, "grpc_port": grpc_port, "insecure": insecure, "cluster": section(join=join)}
    flags |= make_access_flags(keys, key_file)
    plan = FleetPlan(
        name,
        load_config(config, **flags),
        gateways,
        workers,
        RoleResources(gateway_cpus, 0.0, parse_resources(gateway_resource or ())),
        RoleResources(cpus, gpus, parse_resources(resource or ())),
        host,
    )
    _print_roles(start_fleet(address, plan), as_json)


def scale(
    address: Address = "auto",
    name: FleetName = "ray",
    gateways: Annotated[int | None, typer.Option(min=0, help="Number of gateways. [default: unchanged]")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Number of workers. [default: unchanged]")] = None,
    drain_s: DrainS = 20.0,
    as_json: AsJson = False,
) -> None:
    """Set the number of gateways or workers of a fleet. New roles get the settings of the existing roles."""
    from penstock.app.fleet_control import scale_fleet

    _print_roles(scale_fleet(address, name, drain_s, gateway=gateways, worker=workers), as_json)


def down(address: Address = "auto", name: FleetName = "ray", drain_s: DrainS = 20.0, as_json: AsJson = False) -> None:
    """Stop the fleet's gateways, then its workers. Managers keep running."""
    from penstock.app.fleet_control import stop_fleet

    _print_roles(stop_fleet(address, name, drain_s), as_json)


def status(address: Address = "auto", name: FleetName = "ray", as_json: AsJson = False) -> None:
    """List the roles of a fleet and the machines they run on."""
    from penstock.app.fleet_control import read_fleet_status

    _print_roles(read_fleet_status(address, name), as_json)


def _print_roles(roles: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"roles": roles})
        return
    titles = ("role", "state", "machine", "process", "starts", "listens on")
    print_rows(titles, [_format_row(role) for role in roles], "the fleet has no roles")


def _format_row(role: dict[str, Any]) -> tuple[object, ...]:
    listens = ", ".join(f"{kind} {at}" for kind, at in role["places"].items() if kind not in ("host", "node"))
    return role["name"], role["state"], role["machine"], role["pid"] or "", role["starts"] or "", listens
