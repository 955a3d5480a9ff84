"""The fleet of a Ray cluster: each role a detached actor that keeps the role's process on a node that Ray has chosen.

Ray chooses nodes by resources, and starts an actor again elsewhere where its node is lost; on its node the process is
kept by a local fleet, as those of one machine are.
"""

import asyncio
import socket
import tempfile
import threading
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import ray
import structlog

from penstock.core.config import DataPlane
from penstock.core.errors import Unavailable
from penstock.manager.fleet.base import FleetRole, RoleResources, RoleStanding
from penstock.manager.fleet.local import KILLED_S, LocalFleet

log = structlog.get_logger()
T = TypeVar("T")
ANSWER_S = 5.0  # what an actor gets to answer: one that is being placed answers nobody
NAMESPACE = "penstock-{}"
HOST, CONFIG = "{host}", "{config}"  # in a command: the node's address, and a file with the role's settings
PORTS = ("{http}", "{grpc}")  # free ports of the node


class RoleActor:
    """Made anew by Ray, on any node, with what it was made with first."""

    def __init__(self, role: Mapping[str, Any], config: str, host: str) -> None:
        self._role = FleetRole(**{**role, "resources": RoleResources(**role["resources"])})
        self._config = config
        self._host = host or ray.util.get_node_ip_address()
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-role-")
        file = Path(self._folder.name, "config.yaml")
        file.write_text(config)
        self._places = {HOST: self._host, **{port: str(_free_port(self._host)) for port in PORTS}}
        self._values = {**self._places, CONFIG: str(file)}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True).start()
        self._fleet = self._do(self._start())

    def standing(self) -> dict[str, Any]:
        (found,) = self._do(self._fleet.watch())
        used = " ".join(self._role.command)
        places = {name.strip("{}"): value for name, value in self._places.items() if name in used}
        places["node"] = ray.get_runtime_context().get_node_id()
        return {**asdict(found), "machine": ray.util.get_node_ip_address(), "places": places}

    def plan(self) -> tuple[dict[str, Any], str, str]:
        """What another one of its kind is made with."""
        return asdict(self._role), self._config, self._host

    def stop(self, timeout_s: float) -> None:
        self._do(self._fleet.stop([self._role.name], timeout_s))

    async def _start(self) -> LocalFleet:
        fleet = LocalFleet(DataPlane(), lambda name, why: None)
        await fleet.start(FleetRole(self._role.name, tuple(self._filled(part) for part in self._role.command)))
        return fleet

    def _filled(self, part: str) -> str:
        for name, value in self._values.items():
            part = part.replace(name, value)
        return part

    def _do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()


class RayFleet:
    """Use it from one thread at a time: the fleet itself is in Ray, and outlives whoever started it."""

    def __init__(self, address: str, name: str) -> None:
        try:
            ray.init(address, namespace=NAMESPACE.format(name), log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise Unavailable(f"no Ray cluster answers at '{address}': {str(error)[:200]}") from error
        self._config, self._host = "", ""

    def configure(self, config: str, host: str) -> None:
        """Settings for the roles that are started next, and where they listen; nowhere said: their node's address."""
        self._config, self._host = config, host

    async def start(self, role: FleetRole) -> None:
        needs = role.resources
        actor = ray.remote(RoleActor).options(
            name=role.name,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=4,  # its standing is told while it stops
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            resources=dict(needs.custom),
            scheduling_strategy="SPREAD",
        )
        actor.remote(asdict(role), self._config, self._host)

    async def start_like(self, name: str, other: str) -> None:
        """Starts one more role of the kind that another is of."""
        plan, self._config, self._host = await _answer(ray.get_actor(other).plan.remote())
        command = tuple(part if part != _short(other) else _short(name) for part in plan["command"])
        await self.start(
            FleetRole(**{**plan, "name": name, "command": command, "resources": RoleResources(**plan["resources"])})
        )

    async def stop(self, names: Collection[str], timeout_s: float) -> None:
        await asyncio.gather(*(self._stop(name, timeout_s) for name in names))

    async def watch(self) -> list[RoleStanding]:
        return list(await asyncio.gather(*(self._standing(name) for name in self.names())))

    def names(self) -> list[str]:
        return sorted(ray.util.list_named_actors())

    async def close(self) -> None:
        """Leaves the fleet to itself."""
        ray.shutdown()

    async def _stop(self, name: str, timeout_s: float) -> None:
        try:
            actor = ray.get_actor(name)
        except ValueError:
            return  # it is gone
        try:
            await _answer(actor.stop.remote(timeout_s), timeout_s + KILLED_S + ANSWER_S)
        except (TimeoutError, ray.exceptions.RayError):
            log.warning("killing", processes=[name])  # its node is lost, or it was never placed
        ray.kill(actor, no_restart=True)

    async def _standing(self, name: str) -> RoleStanding:
        try:
            return RoleStanding(**await _answer(ray.get_actor(name).standing.remote()))
        except (ValueError, TimeoutError, ray.exceptions.RayError):
            return RoleStanding(name, "waiting")


async def _answer(reference: Any, within_s: float = ANSWER_S) -> Any:
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), within_s)


def _short(name: str) -> str:
    """A role's name on its node."""
    return name.rpartition(".")[2]


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])
