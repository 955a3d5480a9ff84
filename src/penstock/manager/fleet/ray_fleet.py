"""The fleet of a Ray cluster: a detached actor per role, which supervises the role's process on a node chosen by Ray.

Ray chooses nodes by resources, and restarts an actor on another node if its node is lost. On its node the process is
supervised by a local fleet, like the processes of one machine.
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
from penstock.manager.fleet.local_fleet import KILLED_S, LocalFleet
from penstock.manager.fleet.role_processes import FleetRole, RoleResources, RoleStatus

log = structlog.get_logger()
T = TypeVar("T")
ANSWER_S = 5.0  # for an actor to answer; an actor that Ray has not placed yet does not answer
NAMESPACE = "penstock-{}"
HOST, CONFIG = "{host}", "{config}"  # placeholders in a command: the node's address, a file with the role's settings
PORTS = ("{http}", "{grpc}")  # placeholders for free ports of the node


class RoleActor:
    """A Ray actor that runs a role. Ray may create the actor again on any node, with its first arguments."""

    def __init__(self, role: Mapping[str, Any], config: str, host: str) -> None:
        self._role = FleetRole(**{**role, "resources": RoleResources(**role["resources"])})
        self._config = config
        self._host = host or ray.util.get_node_ip_address()
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-role-")
        file = Path(self._folder.name, "config.yaml")
        file.write_text(config)
        self._places = {HOST: self._host, **{port: str(_find_free_port(self._host)) for port in PORTS}}
        self._values = {**self._places, CONFIG: str(file)}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True).start()
        self._fleet = self._run(self._start())

    def status(self) -> dict[str, Any]:
        (found,) = self._run(self._fleet.watch())
        used = " ".join(self._role.command)
        places = {name.strip("{}"): value for name, value in self._places.items() if name in used}
        places["node"] = ray.get_runtime_context().get_node_id()
        return {**asdict(found), "machine": ray.util.get_node_ip_address(), "places": places}

    def plan(self) -> tuple[dict[str, Any], str, str]:
        """Return the arguments with which this actor was created, so that a similar actor can be created."""
        return asdict(self._role), self._config, self._host

    def stop(self, timeout_s: float) -> None:
        self._run(self._fleet.stop([self._role.name], timeout_s))

    async def _start(self) -> LocalFleet:
        fleet = LocalFleet(DataPlane(), lambda name, reason: None)
        await fleet.start(
            FleetRole(self._role.name, tuple(self._fill_placeholders(part) for part in self._role.command))
        )
        return fleet

    def _fill_placeholders(self, part: str) -> str:
        for name, value in self._values.items():
            part = part.replace(name, value)
        return part

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class RayFleet:
    """Controls the fleet's Ray actors, which keep running after this process ends. Use from one thread at a time."""

    def __init__(self, address: str, name: str) -> None:
        try:
            ray.init(address, namespace=NAMESPACE.format(name), log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise Unavailable(f"no Ray cluster answers at '{address}': {str(error)[:200]}") from error
        self._config, self._host = "", ""

    def configure(self, config: str, host: str) -> None:
        """Set the settings and the host for roles that are started later; an empty host means the node's address."""
        self._config, self._host = config, host

    async def start(self, role: FleetRole) -> None:
        needs = role.resources
        actor = ray.remote(RoleActor).options(
            name=role.name,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=4,  # so that `status` answers while `stop` runs
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            resources=dict(needs.custom),
            scheduling_strategy="SPREAD",
        )
        actor.remote(asdict(role), self._config, self._host)

    async def start_copy(self, name: str, copied_name: str) -> None:
        """Start a role with the same arguments as the role `copied_name`."""
        plan, self._config, self._host = await _wait_answer(ray.get_actor(copied_name).plan.remote())
        command = tuple(
            part if part != _extract_role_name(copied_name) else _extract_role_name(name) for part in plan["command"]
        )
        await self.start(
            FleetRole(**{**plan, "name": name, "command": command, "resources": RoleResources(**plan["resources"])})
        )

    async def stop(self, names: Collection[str], timeout_s: float) -> None:
        await asyncio.gather(*(self._stop(name, timeout_s) for name in names))

    async def watch(self) -> list[RoleStatus]:
        return list(await asyncio.gather(*(self._fetch_status(name) for name in self.list_names())))

    def list_names(self) -> list[str]:
        return sorted(ray.util.list_named_actors())

    async def close(self) -> None:
        """Disconnect from Ray; the fleet keeps running."""
        ray.shutdown()

    async def _stop(self, name: str, timeout_s: float) -> None:
        try:
            actor = ray.get_actor(name)
        except ValueError:
            return  # the actor has ended
        try:
            await _wait_answer(actor.stop.remote(timeout_s), timeout_s + KILLED_S + ANSWER_S)
        except (TimeoutError, ray.exceptions.RayError):
            log.warning("processes_killed", processes=[name])  # the actor's node is lost, or it was never placed
        ray.kill(actor, no_restart=True)

    async def _fetch_status(self, name: str) -> RoleStatus:
        try:
            return RoleStatus(**await _wait_answer(ray.get_actor(name).status.remote()))
        except (ValueError, TimeoutError, ray.exceptions.RayError):
            return RoleStatus(name, "waiting")


async def _wait_answer(reference: Any, timeout_s: float = ANSWER_S) -> Any:
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)


def _extract_role_name(name: str) -> str:
    """Return the role's name without the name of its node."""
    return name.rpartition(".")[2]


def _find_free_port(host: str) -> int:
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])
