"""`penstock fleet`: gateways and workers on the machines of a Ray cluster."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.terminal.cluster import AskKeys, ConfigFile, Insecure, Join, access_flags, given
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import print_json, print_rows

Address = Annotated[str, typer.Option(help="The Ray cluster: HOST:PORT of its head, or auto.")]
FleetName = Annotated[str, typer.Option("--name", help="The fleet's name: its roles are NAME.worker-0 and so on.")]
DrainS = Annotated[float, typer.Option(min=0, help="What running requests get where roles leave.")]


def up(
    join: Join = None,
    address: Address = "auto",
    name: FleetName = "ray",
    gateways: Annotated[int, typer.Option(min=0, help="Gateways there shall be at least.")] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Workers there shall be at least.")] = 1,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs that a worker needs of its node.")] = 1.0,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs that a worker needs of its node.")] = 0.0,
    resource: Annotated[
        list[str] | None, typer.Option(help="NAME=AMOUNT of a custom resource that a worker needs; may be repeated.")
    ] = None,
    gateway_cpus: Annotated[float, typer.Option(min=0, help="CPUs that a gateway needs of its node.")] = 1.0,
    gateway_resource: Annotated[
        list[str] | None, typer.Option(help="NAME=AMOUNT of a custom resource that a gateway needs; may be repeated.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where gateways listen. [default: their node's address]")] = "",
    http_port: Annotated[int | None, typer.Option(help="Gateways' REST, metrics, health; 0: a free one.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Gateways' gRPC; 0: a free one.")] = None,
    insecure: Insecure = None,
    keys: AskKeys = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            help="A file with the key that roles show, by its path on every node. [default: PENSTOCK_API_KEY there]",
        ),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Bring up gateways and workers that join the managers; what is there already stays."""
    from penstock.app.fleet import FleetPlan, parse_resources
    from penstock.app.fleet import up as bring_up
    from penstock.core.config import load_config
    from penstock.manager.fleet.base import RoleResources

    flags = {"http_port": http_port, "grpc_port": grpc_port, "insecure": insecure, "cluster": given(join=join)}
    flags |= access_flags(keys, key_file)
    plan = FleetPlan(
        name,
        load_config(config, **flags),
        gateways,
        workers,
        RoleResources(gateway_cpus, 0.0, parse_resources(gateway_resource or ())),
        RoleResources(cpus, gpus, parse_resources(resource or ())),
        host,
    )
    _show(bring_up(address, plan), as_json)


def scale(
    address: Address = "auto",
    name: FleetName = "ray",
    gateways: Annotated[int | None, typer.Option(min=0, help="Gateways there shall be.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Workers there shall be.")] = None,
    drain_s: DrainS = 20.0,
    as_json: AsJson = False,
) -> None:
    """Have more or fewer gateways or workers, like those that are there."""
    from penstock.app.fleet import scale as change

    _show(change(address, name, drain_s, gateway=gateways, worker=workers), as_json)


def down(address: Address = "auto", name: FleetName = "ray", drain_s: DrainS = 20.0, as_json: AsJson = False) -> None:
    """Have them leave, gateways first; the managers stay."""
    from penstock.app.fleet import down as take_down

    _show(take_down(address, name, drain_s), as_json)


def status(address: Address = "auto", name: FleetName = "ray", as_json: AsJson = False) -> None:
    """Show which roles there are, and where."""
    from penstock.app.fleet import status as look

    _show(look(address, name), as_json)


def _show(standings: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"roles": standings})
        return
    titles = ("role", "state", "machine", "process", "starts", "listens")
    print_rows(titles, [_row(each) for each in standings], "the fleet has no roles")


def _row(role: dict[str, Any]) -> tuple[object, ...]:
    listens = ", ".join(f"{kind} {at}" for kind, at in role["places"].items() if kind not in ("host", "node"))
    return role["name"], role["state"], role["machine"], role["pid"] or "", role["starts"] or "", listens
