"""Where the processes of one host find each other and the rest of their cluster: names, sockets, metrics."""

import socket
import sys
from pathlib import Path

from penstock.app.folders import CONFIG_FILE, MANAGER_SOCKET
from penstock.core.cluster.addresses import Address, is_loopback, parse_address
from penstock.core.config import Config, environment_key
from penstock.core.errors import ConfigError
from penstock.wire.endpoints import Endpoint

MANAGER_PORT = 7400
# Of the configuration, for the manager alone.
SECRETS: dict[str, bool | set[str]] = {
    "s3": {"secret_access_key"},
    "triggers": True,
    "access": {"secret"},
    "api_key": True,  # every role has it from its environment
}
ETCD = ("etcd://", "etcds://")
WORKERS_PORT = 7401  # of the first gateway, for workers; its heart has the next one
PORTS_A_GATEWAY = 2


class ServerPlaces:
    """The folder of a running server, or of a role that runs alone. What it has not itself, the configuration tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / CONFIG_FILE
        self.metrics = folder / "metrics"
        self.manager = f"unix:{folder / MANAGER_SOCKET}"

    def managers(self, config: Config) -> tuple[str, ...]:
        """Where roles find their managers: a socket, addresses that they join, or the URL of the managers' store."""
        join = config.cluster.join or self.manager
        return (join,) if is_store(join) else tuple(find_managers(join))

    def gateway(self, gateway_id: str, config: Config) -> Endpoint:
        """Where a gateway has its door for workers."""
        if not is_clustered(config):
            return Endpoint(f"ipc://{self.folder / gateway_id}.ipc")
        return gateway_endpoint(config, _number(gateway_id))

    def task_worker(self, task_worker_id: str) -> Path:
        return self.folder / f"{task_worker_id}.sock"

    def write_config(self, config: Config, only: set[str] | None = None) -> None:
        """`only`: these settings. A store's URL has its password for those who need it, so it is the owner's alone."""
        try:
            self.config.touch(0o600)
            # Without secrets: the manager, which needs them, has them.
            self.config.write_text(config.model_dump_json(include=only, exclude=SECRETS))
        except OSError as error:
            raise ConfigError(
                f"{self.config}: the configuration cannot be written for the server's processes: {error.strerror}; "
                "free some space, or set TMPDIR to another folder"
            ) from error

    def read_config(self) -> Config:
        try:
            found = Config.model_validate_json(self.config.read_text())
            return found.model_copy(update={"api_key": environment_key()})
        except OSError as error:
            raise ConfigError(f"{self.config}: no server runs there: {error.strerror}") from error

    def command(self, role: str, name: str, *flags: str) -> tuple[str, ...]:
        """What starts one more process of this server."""
        return (sys.executable, "-m", "penstock", role, "--id", name, "--run-dir", str(self.folder), *flags)


def task_worker_ids(config: Config) -> list[str]:
    return [f"tasks-{index}" for index in range(config.worker.task_workers)]


# --- in a cluster of several hosts


def is_clustered(config: Config) -> bool:
    """Whether other hosts have a part in it."""
    return bool(config.cluster.join or config.cluster.bind)


def is_store(join: str) -> bool:
    """Whether it is not managers that are joined, but the store that they share."""
    return join.startswith(ETCD)


def named(config: Config, name: str) -> str:
    """What a role of this host is called, so that no other host's has the same name."""
    return f"{config.cluster.node_name}.{name}" if is_clustered(config) else name


def manager_address(config: Config) -> Address:
    """Where a manager listens for other hosts."""
    return _bound(config).at(MANAGER_PORT)


def advertised_manager(config: Config, port: int) -> str:
    """What others are told to reach it by, once it listens on that port."""
    return str(_advertised(config).at(port))


def gateway_endpoint(config: Config, number: int) -> Endpoint:
    """The gateways of one host have ports one after the other, or any that are free where port 0 was given.

    A manager on the same host has the first."""
    bound, told = _bound(config), _advertised(config)
    has_manager = not config.cluster.join
    after = PORTS_A_GATEWAY * number + (1 if has_manager else 0)
    port = WORKERS_PORT + PORTS_A_GATEWAY * number if bound.port is None else bound.port and bound.port + after
    return Endpoint(f"tcp://{Address(bound.host, port)}", told.host, told.port + after if told.port else 0)


def http_scheme(config: Config) -> str:
    return "https" if config.tls.cert else "http"


def clients_address(config: Config, grpc_port: int) -> str:
    """What clients are told to reach a gateway by, over gRPC."""
    host = config.host
    if Address(host).is_wildcard:
        host = _advertised(config).host if is_clustered(config) else socket.gethostname()
    return str(Address(host, grpc_port))


def check_join(config: Config) -> None:
    """Whether there is a manager to join, by what was given."""
    if not config.cluster.join:
        raise ConfigError("where is the manager? give --join HOST[:PORT] or --join etcd://… (setting cluster.join)")
    for each in join_addresses(config.cluster.join):
        if each.is_wildcard:
            raise ConfigError(f"--join {each}: nobody can connect there; give the manager's own address")


def find_managers(join: str) -> list[str]:
    """The addresses of managers, as somebody gave them to join."""
    if join.startswith("unix:"):
        return [join]
    return [str(each.at(MANAGER_PORT)) for each in join_addresses(join)]


def check_store(config: Config) -> None:
    """A manager joins no other managers: several of them meet in a store."""
    if config.cluster.join and not is_store(config.cluster.join):
        raise ConfigError(
            f"--join {config.cluster.join}: managers of one cluster share an etcd: give each --join etcd://HOST:PORT"
        )


def check_bind(config: Config) -> None:
    """What is open to other hosts has to be meant."""
    config.check_reach(_bound(config).host)


def join_addresses(join: str) -> list[Address]:
    """The hosts that one joins: managers, or the nodes of an etcd."""
    _, is_url, rest = join.partition("://")
    found = (rest.partition("?")[0].partition("/")[0] if is_url else join).split(",")
    try:
        return [parse_address(part) for part in found if part.strip() and not join.startswith("unix:")]
    except ValueError as error:
        raise ConfigError(f"--join (setting cluster.join): {error}") from error


def _bound(config: Config) -> Address:
    return parse_address(config.cluster.bind or config.host)


def _advertised(config: Config) -> Address:
    """Where it listens at any address, the one that leads to those it joins."""
    if config.cluster.advertise:
        return parse_address(config.cluster.advertise)
    bound = _bound(config)
    if not bound.is_wildcard:
        return Address(bound.host)
    for address in join_addresses(config.cluster.join):
        if not is_loopback(address.host) and (found := _way_to(address.host)):
            return Address(found)
    raise ConfigError(
        f"it listens on any address ({bound.host}), and others have to be told one: give --advertise (setting "
        "cluster.advertise)"
    )


def _way_to(host: str) -> str:
    """The address of this machine that packets to that host leave from; none is sent."""
    try:
        family, kind, *_, there = socket.getaddrinfo(host, MANAGER_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _number(gateway_id: str) -> int:
    number = gateway_id.rpartition("-")[2]
    return int(number) if number.isdigit() else 0
