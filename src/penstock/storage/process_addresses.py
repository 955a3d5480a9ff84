"""The names, sockets and addresses by which the processes of a host and a cluster find each other."""

import socket
import sys
from pathlib import Path

from penstock.core.cluster.addresses import Address, is_loopback, parse_address
from penstock.core.config import Config, read_environment_key, with_absolute_paths
from penstock.core.errors import ConfigError
from penstock.storage.server_folders import CONFIG_FILE, MANAGER_SOCKET
from penstock.wire.zmq_endpoints import Endpoint

MANAGER_PORT = 7400
# Parts of the configuration that only the manager may read.
SECRETS: dict[str, bool | set[str]] = {
    "s3": {"secret_access_key"},
    "triggers": True,
    "access": {"secret"},
    "directory": {"store"},
    "api_key": True,  # every role reads it from its environment
}
ETCD = ("etcd://", "etcds://")
WORKERS_PORT = 7401  # of the first gateway, for workers; the next port is for heartbeats
PORTS_A_GATEWAY = 2


class ServerPaths:
    """The run folder of a server, or of a role that runs alone: configuration, metrics and sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / CONFIG_FILE
        self.metrics = folder / "metrics"
        self.manager = f"unix:{folder / MANAGER_SOCKET}"

    def list_managers(self, config: Config) -> tuple[str, ...]:
        """Return the addresses of the managers: a socket, addresses to join, or the URL of the managers' store."""
        join = config.cluster.join or self.manager
        return (join,) if is_store(join) else tuple(find_managers(join))

    def get_gateway_endpoint(self, gateway_id: str, config: Config) -> Endpoint:
        """Return the address at which a gateway listens for workers."""
        if not is_clustered(config):
            return Endpoint(f"ipc://{self.folder / gateway_id}.ipc")
        return find_gateway_endpoint(config, _parse_gateway_number(gateway_id))

    def write_config(self, config: Config, only: set[str] | None = None) -> None:
        """Write the configuration, or the settings in `only`, for the server's processes and for commands.

        The file is private, because URLs of stores may contain passwords.
        """
        try:
            self.config.touch(0o600)
            # The secrets that only the manager needs are left out, because the manager already has them.
            self.config.write_text(with_absolute_paths(config).model_dump_json(include=only, exclude=SECRETS))
        except OSError as error:
            raise ConfigError(
                f"{self.config}: the configuration cannot be written for the server's processes: {error.strerror}; "
                "free some space, or set TMPDIR to another folder"
            ) from error

    def read_config(self) -> Config:
        try:
            found = Config.model_validate_json(self.config.read_text())
            return found.model_copy(update={"api_key": read_environment_key()})
        except OSError as error:
            raise ConfigError(f"{self.config}: no server runs in this folder: {error.strerror}") from error

    def build_command(self, role: str, name: str, *flags: str) -> tuple[str, ...]:
        """Return the command that starts a process of this server."""
        return (sys.executable, "-m", "penstock", role, "--id", name, "--run-dir", str(self.folder), *flags)


# --- in a cluster of several hosts


def is_clustered(config: Config) -> bool:
    """Return whether the cluster has several hosts."""
    return bool(config.cluster.join or config.cluster.bind)


def is_store(join: str) -> bool:
    """Return whether `join` is the URL of the managers' shared store instead of a list of managers."""
    return join.startswith(ETCD)


def make_role_id(config: Config, name: str) -> str:
    return f"{config.cluster.node_name}.{name}" if is_clustered(config) else name


def find_manager_address(config: Config) -> Address:
    """Return the address where a manager listens for other hosts."""
    return _bind_address(config).with_default_port(MANAGER_PORT)


def find_advertised_manager(config: Config, port: int) -> str:
    """Return the address at which other hosts reach a manager that listens on `port`."""
    return str(_find_advertised_address(config).with_default_port(port))


def find_gateway_endpoint(config: Config, number: int) -> Endpoint:
    """Return the address at which workers connect to the host's gateway with this number.

    The gateways of a host use consecutive ports, after the port of a manager on the same host. If the port is 0, each
    gateway uses a free port.
    """
    bound, advertised = _bind_address(config), _find_advertised_address(config)
    has_manager = not config.cluster.join
    after = PORTS_A_GATEWAY * number + (1 if has_manager else 0)
    port = WORKERS_PORT + PORTS_A_GATEWAY * number if bound.port is None else bound.port and bound.port + after
    advertised_port = advertised.port + after if advertised.port else 0
    return Endpoint(f"tcp://{Address(bound.host, port)}", advertised.host, advertised_port)


def choose_http_scheme(config: Config) -> str:
    return "https" if config.tls.cert else "http"


def find_clients_address(config: Config, grpc_port: int) -> str:
    """Return the address at which clients reach a gateway over gRPC."""
    host = config.host
    if Address(host).is_wildcard:
        host = _find_advertised_address(config).host if is_clustered(config) else socket.gethostname()
    return str(Address(host, grpc_port))


def check_join(config: Config) -> None:
    """Raise ConfigError unless `cluster.join` names managers that this host can connect to."""
    if not config.cluster.join:
        raise ConfigError("no manager to join: give --join HOST[:PORT] or --join etcd://… (setting cluster.join)")
    for each in parse_join_addresses(config.cluster.join):
        if each.is_wildcard:
            raise ConfigError(f"--join {each}: this is a listening address only; give the manager's own address")


def find_managers(join: str) -> list[str]:
    """Return the managers' addresses from the value of `join`."""
    if join.startswith("unix:"):
        return [join]
    return [str(each.with_default_port(MANAGER_PORT)) for each in parse_join_addresses(join)]


def check_store(config: Config) -> None:
    """Raise ConfigError if a manager is to join other managers instead of their store."""
    if config.cluster.join and not is_store(config.cluster.join):
        raise ConfigError(
            f"--join {config.cluster.join}: managers of one cluster need a shared etcd; give each of them "
            "--join etcd://HOST:PORT"
        )


def check_bind(config: Config) -> None:
    """Raise ConfigError if other machines can reach this host without API keys, unless `insecure` is set."""
    config.check_reach(_bind_address(config).host)


def parse_join_addresses(join: str) -> list[Address]:
    """Return the hosts in a value of `join`: managers, or servers of an etcd."""
    _, is_url, rest = join.partition("://")
    found = (rest.partition("?")[0].partition("/")[0] if is_url else join).split(",")
    try:
        return [parse_address(part) for part in found if part.strip() and not join.startswith("unix:")]
    except ValueError as error:
        raise ConfigError(f"--join (setting cluster.join): {error}") from error


def _bind_address(config: Config) -> Address:
    return parse_address(config.cluster.bind or config.host)


def _find_advertised_address(config: Config) -> Address:
    """Return the address at which other hosts should connect to this host.

    If this host listens on all its addresses, return the address from which it connects to the hosts that it joins.
    """
    if config.cluster.advertise:
        return parse_address(config.cluster.advertise)
    bound = _bind_address(config)
    if not bound.is_wildcard:
        return Address(bound.host)
    for address in parse_join_addresses(config.cluster.join):
        if not is_loopback(address.host) and (found := _find_source_address(address.host)):
            return Address(found)
    raise ConfigError(
        f"this host listens on all addresses ({bound.host}), but other hosts need one address to connect to: give "
        "--advertise (setting cluster.advertise)"
    )


def _find_source_address(host: str) -> str:
    """Return the address of this machine from which packets to `host` would be sent, without sending a packet."""
    try:
        family, kind, *_, there = socket.getaddrinfo(host, MANAGER_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _parse_gateway_number(gateway_id: str) -> int:
    number = gateway_id.rpartition("-")[2]
    return int(number) if number.isdigit() else 0
