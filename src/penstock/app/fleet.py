"""Gateways and workers on the machines of a Ray cluster: what is started there, and how many of each."""

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.app.places import SECRETS, check_join
from penstock.app.process import LEAVE_S
from penstock.core.config import Config
from penstock.core.errors import ConfigError, Unavailable
from penstock.manager.fleet.base import FleetRole, RoleResources

if TYPE_CHECKING:
    from penstock.manager.fleet.ray import RayFleet

GATEWAY, WORKER = "gateway", "worker"
Standings = list[dict[str, Any]]
REACH_S = 5.0  # what the head of a Ray cluster gets to take a connection


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What `up` brings up. A role of the fleet is called `<fleet>.worker-0` wherever it runs."""

    name: str
    config: Config  # of every role
    gateways: int
    workers: int
    gateway_needs: RoleResources
    worker_needs: RoleResources
    host: str = ""  # where gateways listen; empty: the address of their node

    def check(self) -> None:
        check_join(self.config)
        if self.gateways:
            self.config.check_reach(self.host or "of the node")

    def roles(self) -> Iterator[FleetRole]:
        for number in range(self.gateways):
            yield FleetRole(role_name(GATEWAY, number), self._gateway(number), resources=self.gateway_needs)
        for number in range(self.workers):
            yield FleetRole(role_name(WORKER, number), self._worker(number), resources=self.worker_needs)

    def _command(self, role: str, number: int, *flags: str) -> tuple[str, ...]:
        # The configuration is the fleet's, what is after it the node's.
        at = ("--node", self.name, "--id", role_name(role, number), "--config", "{config}")
        return (sys.executable, "-m", "penstock", role, *at, *flags)

    def _gateway(self, number: int) -> tuple[str, ...]:
        http, grpc = str(self.config.http_port or "{http}"), str(self.config.grpc_port or "{grpc}")
        ports = ("--http-port", http, "--grpc-port", grpc)
        return self._command(GATEWAY, number, "--host", "{host}", "--bind", "{host}:0", *ports)

    def _worker(self, number: int) -> tuple[str, ...]:
        return self._command(WORKER, number, "--health-port", "0", "--health-grpc-port", "0")


def role_name(role: str, number: int) -> str:
    return f"{role}-{number}"


def up(address: str, plan: FleetPlan) -> Standings:
    """What is there already stays as it is."""
    plan.check()
    config = plan.config.model_dump_json(exclude_unset=True, exclude=SECRETS)

    async def act(fleet: "RayFleet") -> None:
        fleet.configure(config, plan.host)
        for role in plan.roles():
            await fleet.start(role)

    return _in_fleet(address, plan.name, act)


def scale(address: str, name: str, drain_s: float, **counts: int | None) -> Standings:
    """`counts`: how many there shall be of each role; new ones are like those that are there."""

    async def act(fleet: "RayFleet") -> None:
        for role, count in counts.items():
            if count is not None:
                await _scale(fleet, role, count, drain_s)

    return _in_fleet(address, name, act)


async def _scale(fleet: "RayFleet", role: str, count: int, drain_s: float) -> None:
    there = {number for each in fleet.names() if (number := _number(role, each)) is not None}
    missing = [number for number in range(count + len(there)) if number not in there][: max(0, count - len(there))]
    if missing and not there:
        raise ConfigError(f"the fleet has no {role} that another could be like: start the first with `fleet up`")
    for number in missing:
        await fleet.start_like(role_name(role, number), role_name(role, min(there)))
    gone = sorted(there, reverse=True)[: max(0, len(there) - count)]
    await fleet.stop([role_name(role, number) for number in gone], drain_s + LEAVE_S)


def down(address: str, name: str, drain_s: float) -> Standings:
    """Gateways first: what is inside needs its workers."""

    async def act(fleet: "RayFleet") -> None:
        for role in (GATEWAY, WORKER):
            await fleet.stop([each for each in fleet.names() if _number(role, each) is not None], drain_s + LEAVE_S)

    return _in_fleet(address, name, act)


def status(address: str, name: str) -> Standings:
    return _in_fleet(address, name, None)


def _in_fleet(address: str, name: str, act: "Callable[[RayFleet], Coroutine[Any, Any, None]] | None") -> Standings:
    check_answers(address)
    try:
        from penstock.manager.fleet.ray import RayFleet
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("this needs Ray: pip install 'penstock-serve[ray]', here and on Ray's nodes") from error

    async def run() -> Standings:
        fleet = RayFleet(address, name)
        try:
            if act is not None:
                await act(fleet)
            return [asdict(standing) for standing in await fleet.watch()]
        finally:
            await fleet.close()

    with redirect_stdout(sys.stderr):  # Ray prints what it notices: that is not the answer
        return asyncio.run(run())


def check_answers(address: str) -> None:
    """Of HOST:PORT; Ray itself would look for it for minutes, and say nothing that a person can use."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        raise Unavailable(
            f"no Ray cluster answers at {address}: {error}. Give --address HOST:PORT of its head, usually port 6379"
        ) from error


def parse_resources(texts: Sequence[str]) -> dict[str, float]:
    """Of `NAME=AMOUNT` each."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            found[name] = float(amount)
        except ValueError as error:
            raise ConfigError(f"--resource '{text}': give NAME=AMOUNT, by names that Ray's nodes have") from error
    return found


def _number(role: str, name: str) -> int | None:
    kind, _, number = name.rpartition("-")
    return int(number) if kind == role and number.isdecimal() else None
