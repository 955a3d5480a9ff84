"""Start, scale and stop gateways and workers on the machines of a Ray cluster."""

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.app.role_process import LEAVE_S
from penstock.core.config import Config
from penstock.core.errors import ConfigError, Unavailable
from penstock.manager.fleet.role_processes import FleetRole, RoleResources
from penstock.storage.process_addresses import SECRETS, check_join

if TYPE_CHECKING:
    from penstock.manager.fleet.ray_fleet import RayFleet

GATEWAY, WORKER = "gateway", "worker"
RoleStates = list[dict[str, Any]]
REACH_S = 5.0  # for a connection to the head of a Ray cluster


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The roles of a fleet. The first worker of the fleet `pool` is named `pool.worker-0` on every node."""

    name: str
    config: Config  # for every role
    gateways: int
    workers: int
    gateway_needs: RoleResources
    worker_needs: RoleResources
    host: str = ""  # that gateways listen at; empty: the address of their node

    def check(self) -> None:
        check_join(self.config)
        if self.gateways:
            self.config.check_reach(self.host or "of the node")

    def list_roles(self) -> Iterator[FleetRole]:
        for number in range(self.gateways):
            yield FleetRole(
                make_role_name(GATEWAY, number), self._build_gateway_command(number), resources=self.gateway_needs
            )
        for number in range(self.workers):
            yield FleetRole(
                make_role_name(WORKER, number), self._build_worker_command(number), resources=self.worker_needs
            )

    def _build_command(self, role: str, number: int, *flags: str) -> tuple[str, ...]:
        # Flags before and with --config are the same on every node; those after it depend on the node.
        at = ("--node", self.name, "--id", make_role_name(role, number), "--config", "{config}")
        return (sys.executable, "-m", "penstock", role, *at, *flags)

    def _build_gateway_command(self, number: int) -> tuple[str, ...]:
        http, grpc = str(self.config.http_port or "{http}"), str(self.config.grpc_port or "{grpc}")
        ports = ("--http-port", http, "--grpc-port", grpc)
        return self._build_command(GATEWAY, number, "--host", "{host}", "--bind", "{host}:0", *ports)

    def _build_worker_command(self, number: int) -> tuple[str, ...]:
        return self._build_command(WORKER, number, "--health-port", "0", "--health-grpc-port", "0")


def make_role_name(role: str, number: int) -> str:
    return f"{role}-{number}"


def start_fleet(address: str, plan: FleetPlan) -> RoleStates:
    """Start the roles of the plan that do not run yet; roles that run are not changed."""
    plan.check()
    config = plan.config.model_dump_json(exclude_unset=True, exclude=SECRETS)

    async def act(fleet: "RayFleet") -> None:
        fleet.configure(config, plan.host)
        for role in plan.list_roles():
            await fleet.start(role)

    return _run_in_fleet(address, plan.name, act)


def scale_fleet(address: str, name: str, drain_s: float, **counts: int | None) -> RoleStates:
    """Start or stop roles until each kind has its number in `counts`; new roles copy the first role of their kind."""

    async def act(fleet: "RayFleet") -> None:
        for role, count in counts.items():
            if count is not None:
                await _scale_role(fleet, role, count, drain_s)

    return _run_in_fleet(address, name, act)


async def _scale_role(fleet: "RayFleet", role: str, count: int, drain_s: float) -> None:
    running = {number for each in fleet.list_names() if (number := _parse_number(role, each)) is not None}
    missing = [number for number in range(count + len(running)) if number not in running]
    missing = missing[: max(0, count - len(running))]
    if missing and not running:
        raise ConfigError(f"the fleet has no {role} to copy: start the first with `fleet up`")
    for number in missing:
        await fleet.start_copy(make_role_name(role, number), make_role_name(role, min(running)))
    surplus = sorted(running, reverse=True)[: max(0, len(running) - count)]
    await fleet.stop([make_role_name(role, number) for number in surplus], drain_s + LEAVE_S)


def stop_fleet(address: str, name: str, drain_s: float) -> RoleStates:
    """Stop all roles, gateways first, because their running requests need the workers."""

    async def act(fleet: "RayFleet") -> None:
        for role in (GATEWAY, WORKER):
            await fleet.stop(
                [each for each in fleet.list_names() if _parse_number(role, each) is not None], drain_s + LEAVE_S
            )

    return _run_in_fleet(address, name, act)


def read_fleet_status(address: str, name: str) -> RoleStates:
    return _run_in_fleet(address, name, None)


def _run_in_fleet(address: str, name: str, act: "Callable[[RayFleet], Coroutine[Any, Any, None]] | None") -> RoleStates:
    check_answers(address)
    try:
        from penstock.manager.fleet.ray_fleet import RayFleet
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("this needs Ray: pip install 'penstock-serve[ray]', here and on Ray's nodes") from error

    async def run() -> RoleStates:
        fleet = RayFleet(address, name)
        try:
            if act is not None:
                await act(fleet)
            return [asdict(state) for state in await fleet.watch()]
        finally:
            await fleet.close()

    with redirect_stdout(sys.stderr):  # Ray prints messages, which must not mix with the output of the command
        return asyncio.run(run())


def check_answers(address: str) -> None:
    """Raise Unavailable if nothing listens at HOST:PORT. Ray would try for minutes and fail with an unclear error."""
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
    """Parse texts of the form `NAME=AMOUNT`; raise ConfigError for any other text."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            found[name] = float(amount)
        except ValueError as error:
            raise ConfigError(
                f"--resource '{text}': give NAME=AMOUNT, with a resource name that Ray's nodes have"
            ) from error
    return found


def _parse_number(role: str, name: str) -> int | None:
    kind, _, number = name.rpartition("-")
    return int(number) if kind == role and number.isdecimal() else None
