"""Starting a fleet and changing its size, without a Ray cluster."""

from typing import Any, cast

import pytest

from penstock.app import fleet_control
from penstock.app.fleet_control import FleetPlan, parse_resources
from penstock.core.config import Config, load_config
from penstock.core.errors import ConfigError, Unavailable
from penstock.manager.fleet.role_processes import RoleResources


def joined(**flags: Any) -> Config:
    return load_config(None, cluster={"join": "10.0.0.1"}, **flags)


def plan(config: Config, host: str = "", gateways: int = 1, workers: int = 2) -> FleetPlan:
    return FleetPlan("pool", config, gateways, workers, RoleResources(0.5), RoleResources(2, 1, {"spot": 1}), host)


def test_roles_have_unique_names_and_their_resources() -> None:
    roles = list(plan(joined(http_port=0)).list_roles())
    assert [role.name for role in roles] == ["gateway-0", "worker-0", "worker-1"]
    gateway, worker = " ".join(roles[0].command), " ".join(roles[2].command)
    assert "penstock gateway --node pool --id gateway-0 --config {config} --host {host} --bind {host}:0" in gateway
    assert "--http-port {http} --grpc-port 50051" in gateway
    assert "penstock worker --node pool --id worker-1 --config {config}" in worker
    assert (roles[0].resources.cpus, roles[1].resources.custom) == (0.5, {"spot": 1})


def test_a_role_that_cannot_start_is_reported() -> None:
    with pytest.raises(ConfigError, match="no manager to join"):
        fleet_control.start_fleet("nowhere", plan(load_config(None)))
    with pytest.raises(ConfigError, match="--insecure"):
        fleet_control.start_fleet("nowhere", plan(joined()))
    plan(joined(), host="127.0.0.1").check()
    plan(joined(), gateways=0).check()
    plan(joined(insecure=True)).check()
    plan(joined(access={"keys": "required"}, api_key_file="/on/every/node")).check()


@pytest.mark.parametrize("port", ["1", "99999999"])
def test_an_unreachable_ray_cluster_is_reported_at_once(port: str) -> None:
    with pytest.raises(Unavailable, match="no Ray cluster answers"):
        fleet_control.read_fleet_status(f"127.0.0.1:{port}", "penstock")


def test_resources_are_read_as_names_and_amounts() -> None:
    assert parse_resources(["spot=1", "rack-2=0.5"]) == {"spot": 1.0, "rack-2": 0.5}
    for wrong in ("spot", "spot=", "spot=many"):
        with pytest.raises(ConfigError, match="NAME=AMOUNT"):
            parse_resources([wrong])


class Roles:
    def __init__(self, *names: str) -> None:
        self._names = set(names)
        self.started: list[tuple[str, str]] = []
        self.stopped: list[str] = []

    def list_names(self) -> list[str]:
        return sorted(self._names)

    async def start_copy(self, name: str, copied_name: str) -> None:
        self.started.append((name, copied_name))

    async def stop(self, names: list[str], timeout_s: float) -> None:
        self.stopped += names


@pytest.mark.parametrize(
    ("count", "started", "stopped"),
    [
        (2, [], []),
        (4, [("worker-1", "worker-0"), ("worker-3", "worker-0")], []),
        (1, [], ["worker-2"]),
        (0, [], ["worker-2", "worker-0"]),
    ],
)
async def test_scaling_fills_gaps_and_stops_the_newest_roles(
    count: int, started: list[tuple[str, str]], stopped: list[str]
) -> None:
    roles = Roles("gateway-0", "worker-0", "worker-2")
    await fleet_control._scale_role(cast(Any, roles), "worker", count, 1.0)
    assert (roles.started, roles.stopped) == (started, stopped)
    with pytest.raises(ConfigError, match="fleet up"):
        await fleet_control._scale_role(cast(Any, Roles()), "worker", 1, 1.0)
