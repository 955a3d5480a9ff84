"""Opens a role's health door where the configuration says, or at the role's usual ports."""

from collections.abc import Callable
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
from penstock.app.ports import open_own_socket, open_usual
from penstock.core.cluster.addresses import Address
from penstock.core.config import Config
from penstock.core.principals import MEASURING, Principal
from penstock.gateway.http.cluster.health import LIMITS, MAX_CONNECTIONS, HealthApp
from penstock.gateway.http.doorman import Doorman, machine_names
from penstock.gateway.http.server import serve_door
from penstock.telemetry.door import HealthDoor, Problem
from penstock.telemetry.metrics import shared_registry
from penstock.wire.credentials.certificates import Certificates, ClientAuth

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

    wanted, limits = config.health, config.limits.model_copy(update=LIMITS)
    config.check_reach(wanted.host)

    # Whoever asks for health need not show who they are.
    door = HealthDoor(problem, partial(certificates.add_port, client_auth="none"), health)
    stack.push_async_callback(door.close)
    doorman = Doorman(config.model_copy(update={"host": wanted.host}), guard or _own_guard(config), machine_names())
    app = HealthApp(doorman, door.problem, registry)
    listen = partial(open_own_socket, wanted.host, "health.http_port")
    opened = await open_usual(listen, wanted.http_port, usual.http)
    client_auth: ClientAuth = "optional" if certificates.is_asking else "none"
    close = serve_door(app, opened, limits, MAX_CONNECTIONS, certificates, client_auth=client_auth)
    stack.push_async_callback(close)
    http = Address(wanted.host, opened.getsockname()[1])
    grpc = await open_usual(lambda port: door.open_grpc(Address(wanted.host, port)), wanted.grpc_port, usual.grpc)
    log.info("health_door", http=f"{http_scheme(config)}://{http}", grpc=str(grpc))


def _own_guard(config: Config) -> Guard:
    """Its metrics are for whoever has the key of the role itself."""
    key, guard = config.shown_key(), make_guard(config, config.health.host)
    own = Principal("own", scopes=MEASURING)
    guard.keys_changed(KeyTable(b"", is_asking=False, further={key: own} if key else {}))
    return guard
