"""Opens a role's health door where the configuration says, or at the role's usual ports."""

from asyncio import BaseTransport
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

import structlog
from grpc_health.v1.health import aio as health_aio
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from penstock.access.guard import Guard
from penstock.access.keys import KeyTable
from penstock.app.certificates import make_guard
from penstock.app.places import ServerPlaces, http_scheme
from penstock.app.ports import open_usual
from penstock.core.cluster.addresses import Address
from penstock.core.config import Config
from penstock.core.errors import PenstockError
from penstock.core.principals import Principal, Scope, needs
from penstock.gateway.http.doorman import Doorman, machine_names
from penstock.telemetry.door import DoorSecurity, HealthDoor, Problem
from penstock.telemetry.metrics import shared_registry
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.credentials.names import names_of_transport

log = structlog.get_logger()


class UsualPorts(NamedTuple):
    http: int
    grpc: int


MANAGER_DOOR = UsualPorts(7410, 7411)
WORKER_DOOR = UsualPorts(7420, 7421)
MACHINE_DOOR = UsualPorts(7430, 7431)


async def open_health_door(
    config: Config,
    places: ServerPlaces,
    usual: UsualPorts,
    problem: Problem,
    certificates: Certificates,
    stack: AsyncExitStack,
    look: Callable[[], Collector] | None = None,
    health: health_aio.HealthServicer | None = None,
    guard: Guard | None = None,
) -> None:
    """`look` gives what is shown beside the metrics of the machine's processes; `health` is what another server of the
    role says, too. Who has no guard knows no keys but its own."""

    def registry() -> CollectorRegistry:
        found = shared_registry(places.metrics)
        if look is not None:
            found.register(look())
        return found

    doorman = Doorman(
        config.model_copy(update={"host": config.health.host}), guard or _own_guard(config), machine_names()
    )
    guarding, security = partial(_refusal, doorman), _security(certificates)
    door = HealthDoor(problem, registry, doorman.refusal, guarding, health, security)
    stack.push_async_callback(door.close)
    wanted = config.health
    config.check_reach(wanted.host)
    http = await open_usual(lambda port: door.open_http(Address(wanted.host, port)), wanted.http_port, usual.http)
    grpc = await open_usual(lambda port: door.open_grpc(Address(wanted.host, port)), wanted.grpc_port, usual.grpc)
    log.info("health_door", http=f"{http_scheme(config)}://{http}", grpc=str(grpc))


def _security(certificates: Certificates) -> DoorSecurity | None:
    """Whoever asks for health need not show who they are."""
    if not certificates.is_serving:
        return None
    context = certificates.server_context("optional" if certificates.is_asking else "none")
    return DoorSecurity(context, lambda server: partial(certificates.add_port, server, client_auth="none"))


def _own_guard(config: Config) -> Guard:
    """Its metrics are for whoever has the key of the role itself."""
    key, guard = config.shown_key(), make_guard(config, config.health.host)
    own = Principal("own", scopes=needs(Scope.METRICS))
    guard.keys_changed(KeyTable(b"", is_asking=False, further={key: own} if key else {}))
    return guard


def _refusal(
    doorman: Doorman, headers: Iterable[tuple[bytes, bytes]], connection: BaseTransport
) -> PenstockError | None:
    """Why the metrics are not for this caller."""
    try:
        doorman.admit(headers, needs(Scope.METRICS), names_of_transport(connection))
    except PenstockError as error:
        return error
    return None
