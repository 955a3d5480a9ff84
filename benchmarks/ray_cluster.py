"""A Ray cluster with several nodes on this machine, and a manager that the roles of a fleet join."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.cluster import start_manager
from benchmarks.waiting import eventually

START_S = 120.0
# Ray detects a lost node in seconds instead of half a minute; starting nodes have time to answer.
QUICK = {"health_check_initial_delay_ms": 5000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
OBJECTS_BYTES = 80 * 1024 * 1024  # size of a node's object store, which is not used


def _begin(head: dict[str, Any]) -> Any:
    from ray.cluster_utils import Cluster

    return Cluster(True, head_node_args=head)


class RayCluster:
    """A context manager for the cluster.

    `nodes` has the custom resources of each node; the head has none, and no CPUs.
    """

    def __init__(self, nodes: Sequence[Mapping[str, float]], models: Path, folder: Path) -> None:
        self._nodes = nodes
        self._models = models
        self._folder = folder

    def __enter__(self) -> Self:
        common: dict[str, Any] = {"object_store_memory": OBJECTS_BYTES, "include_dashboard": False}
        head = {"num_cpus": 0, "_system_config": QUICK, **common}
        try:
            self._cluster = _begin(head)
        except RuntimeError:  # sometimes Ray's first process opens no port within half a minute
            self._cluster = _begin(head)
        for resources in self._nodes:
            own = dict(resources)
            self._cluster.add_node(num_cpus=4, num_gpus=own.pop("GPU", 0), resources=own, **common)
        self._cluster.wait_for_nodes()
        self._manager = start_manager(self._models, self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.stop()
        self._cluster.shutdown()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def manager(self) -> str:
        return str(self._manager.lines("manager_started")[0]["address"])

    def fleet(self, command: str, *flags: str) -> dict[str, dict[str, Any]]:
        """Run `penstock fleet` and return its roles by name."""
        line = [sys.executable, "-m", "penstock", "fleet", command, "--address", self.address, "--json"]
        done = subprocess.run([*line, *flags], capture_output=True, text=True, timeout=START_S)
        if done.returncode:
            raise RuntimeError(f"fleet {command} ended with {done.returncode}: {done.stderr[-2000:]}")
        return {role["name"]: role for role in json.loads(done.stdout)["roles"]}

    def running(self) -> dict[str, dict[str, Any]]:
        """Return the roles once all of them run."""
        found: dict[str, dict[str, Any]] = {}

        def is_so() -> bool:
            found.clear()
            found.update(self.fleet("status"))
            return all(role["state"] == "running" for role in found.values())

        eventually(is_so, "all roles of the fleet run", START_S)
        return found

    def kill_node(self, node_id: str) -> None:
        """Kill a node and everything that runs on it."""
        node = next(each for each in self._cluster.worker_nodes if each.node_id == node_id)
        self._cluster.remove_node(node, allow_graceful=False)
