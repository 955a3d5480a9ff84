"""A cluster for fault scenarios: 3 etcd nodes, 3 managers, 2 gateways and 3 workers, each on its own host."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.cluster import ClusterHosts
from benchmarks.etcd import NODES, Etcd
from benchmarks.waiting import until_seen
from penstock.core.cluster.manager_records import LEADER_KEY, MANAGERS_PREFIX
from penstock.storage.metadata.metadata_store import MetadataStore
from penstock.storage.metadata.opening import open_metadata
from tests.chaos.checked_load import CheckedLoad, EchoQuestion, Tally
from tests.chaos.repository import ECHO

ETCD_HOSTS, MANAGER_HOSTS, GATEWAY_HOSTS, WORKER_HOSTS = range(NODES), range(NODES, 6), range(6, 8), range(8, 11)
HOSTS = 11
START_S = 120.0
CALLERS, PAUSE_S = 8, 0.02


class LoggedTerm(NamedTuple):
    manager: str
    epoch: int
    began: float  # monotonic times, which all processes share
    ended: float


@dataclass(slots=True)
class ClusterBed:
    """A context manager for the cluster. `store` is a client of etcd for checks."""

    models: Path
    folder: Path
    hosts: ClusterHosts = field(init=False)
    etcd: Etcd = field(init=False)
    store: MetadataStore = field(init=False)
    _stack: ExitStack = field(default_factory=ExitStack)
    _killed: dict[int, list[float]] = field(default_factory=dict)  # managers' hosts, and when their manager was killed

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.store.close()
        self._stack.close()

    async def _start(self) -> None:
        hosts = self.hosts = self._stack.enter_context(ClusterHosts(HOSTS, self.folder))
        self.etcd = self._stack.enter_context(Etcd(self.folder, hosts))
        self.store = await open_metadata(self.url, self.folder)
        for host in MANAGER_HOSTS:
            hosts.manager(host, self.models, "--join", self.url)
        for host in GATEWAY_HOSTS:
            hosts.gateway(host, self.url)
        for host in WORKER_HOSTS:
            hosts.worker(host, self.url)
        await self.wait_until_complete()

    @property
    def url(self) -> str:
        return self.etcd.url

    # --- its state

    async def find_leader_host(self) -> int:
        """Return the host of the manager that leads."""
        record = await self.store.get(LEADER_KEY)
        assert record is not None, "no manager leads"
        address = json.loads(record.value)["address"].rpartition(":")[0]
        return next(host for host in MANAGER_HOSTS if self.hosts.address(host) == address)

    async def wait_until_complete(self) -> None:
        """Wait until every manager is registered, and every gateway is ready and knows every worker."""
        names = {f"h{host}.worker-0" for host in WORKER_HOSTS}
        for host in GATEWAY_HOSTS:
            await until_seen(lambda at=host: self._is_ready(at, names), f"gateway {host} is ready", START_S)  # type: ignore[misc]
        deadline = time.monotonic() + START_S
        while len((await self.store.list(MANAGERS_PREFIX)).records) < len(MANAGER_HOSTS) or not await self.store.get(
            LEADER_KEY
        ):
            if time.monotonic() > deadline:
                raise TimeoutError("not every manager is registered")

    def _is_ready(self, host: int, workers: set[str]) -> bool:
        return self.hosts.http(host, "/v2/health/ready")[0] == 200 and self.list_serving_blocks(host).keys() >= workers

    def list_serving_blocks(self, gateway: int) -> dict[str, set[str]]:
        """Return the blocks that each worker serves, as a gateway reports them."""
        found: list[dict[str, Any]] = self.hosts.status(gateway).get("workers", [])
        return {worker["id"]: set(worker["blocks"]) for worker in found}

    def list_holders(self, block_id: str) -> set[str]:
        """Return the workers that serve a block according to every gateway."""
        said = [
            {worker for worker, blocks in self.list_serving_blocks(host).items() if block_id in blocks}
            for host in GATEWAY_HOSTS
        ]
        return set.intersection(*said)

    # --- faults

    def kill_manager(self, host: int) -> None:
        self.hosts.roles[f"h{host}.manager"].kill()
        self._killed.setdefault(host, []).append(time.monotonic())

    def start_manager(self, host: int) -> None:
        self.hosts.manager(host, self.models, "--join", self.url)

    def start_worker(self, host: int) -> None:
        self.hosts.worker(host, self.url)

    # --- its reports

    def terms(self) -> Iterator[LoggedTerm]:
        """Yield every term from the managers' logs; a manager's death ends its term."""
        for host in MANAGER_HOSTS:
            process = self.hosts.roles[f"h{host}.manager"]
            ends = {line["epoch"]: line["at_s"] for line in process.lines("term_ended")}
            killed = self._killed.get(host, [])
            for line in process.lines("term_started"):
                died = next((at for at in killed if at > line["at_s"]), float("inf"))
                yield LoggedTerm(line["manager"], line["epoch"], line["at_s"], min(died, ends.get(line["epoch"], died)))

    def list_accepted_terms(self) -> Mapping[str, list[int]]:
        """Return the terms that each worker accepted, in order."""
        roles = {name: role for name, role in self.hosts.roles.items() if name.endswith(".worker")}
        return {name: [line["epoch"] for line in role.lines("leader_accepted")] for name, role in roles.items()}


class GatewayLoad:
    """A context manager that loads every gateway alike, with a deadline for each request."""

    def __init__(self, bed: ClusterBed, models: Sequence[str] = (ECHO,)) -> None:
        targets = [f"{bed.hosts.address(host)}:50051" for host in GATEWAY_HOSTS]
        questions = [EchoQuestion(model) for model in models]
        self._loads = [CheckedLoad(target, questions, CALLERS, PAUSE_S) for target in targets]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for load in self._loads:
            await self._stack.enter_async_context(load)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def answered_more(self, count: int) -> None:
        for load in self._loads:
            await load.answered_more(count)

    def tallies(self) -> list[Tally]:
        return [load.tally for load in self._loads]

    def failed(self) -> int:
        return sum(tally.failed + tally.duplicates for tally in self.tallies())

    def details(self) -> list[dict[str, Any]]:
        return [tally.details() for tally in self.tallies()]
