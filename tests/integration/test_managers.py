"""Three managers on a real etcd of three nodes: the leader is killed or suspended, an etcd node is killed."""

import asyncio
import hashlib
import json
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from benchmarks.etcd import Etcd
from benchmarks.hosts import HostProcess
from benchmarks.peers.peer import find_free_ports
from benchmarks.waiting import eventually
from penstock.client.cluster import ClusterClient
from penstock.client.registry import CHUNK_BYTES, RegistryClient
from penstock.core.cluster.manager_records import LEADER_KEY
from penstock.core.errors import Conflict
from penstock.features.registry.manifest import Manifest
from penstock.features.registry.pull import pull
from penstock.pb.v1 import cluster_pb2, registry_pb2
from penstock.pb.v1 import manager_pb2 as pb
from penstock.pb.v1.leader_pb2 import LeaderRequest, LeaderResponse
from penstock.pb.v1.leader_pb2_grpc import LeadersStub
from penstock.pb.v1.manager_pb2_grpc import ManagerStub
from penstock.pb.v1.registry_pb2_grpc import ModelRegistryStub
from penstock.storage.metadata.etcd import EtcdMetadataStore
from penstock.storage.metadata.metadata_store import Compare, Record, Write
from tests.registry_bed import manifest_of, write_files
from tests.servers import floats_json, write_factor

WAIT_S = 90.0
MANAGERS = 3
HEALTH_PORTS = ("--health-port", "0", "--health-grpc-port", "0")


class ManagedCluster:
    """A cluster on loopback: the gateway knows two managers, the worker uses etcd."""

    def __init__(self, folder: Path, etcd: Etcd) -> None:
        self.folder, self.etcd = folder, etcd
        *ports, self.http_port, grpc_port = find_free_ports(MANAGERS + 2)
        self.managers = {f"127.0.0.1:{port}": self._manage(port) for port in ports}
        told = ",".join(list(self.managers)[:2])
        http = ("--http-port", str(self.http_port), "--grpc-port", str(grpc_port), "--bind", "127.0.0.1:0")
        self._others = [
            self._start("gateway", "endpoint", "--join", told, *http),
            self._start("worker", "hand", "--join", etcd.url, *HEALTH_PORTS),
        ]
        eventually(lambda: self.infer(3.0) == 6.0, "it answers", WAIT_S)
        eventually(lambda: len(self.ask(self.leader()).managers) == MANAGERS, "every manager is there", WAIT_S)

    def restart(self, address: str) -> None:
        self.managers[address] = self._manage(int(address.rpartition(":")[2]))
        eventually(lambda: self.managers[address].lines("manager_started"), "it manages", WAIT_S)

    def close(self) -> None:
        processes = [*self._others, *self.managers.values()]
        for process in processes:
            process.signal(signal.SIGCONT)
            process.terminate()
        for process in processes:
            process.end()

    def leader(self, after: int = 0) -> str:
        """Return the address of the manager that leads in a later term than `after`."""
        found: list[str] = []

        def is_there() -> bool:
            for address, process in self.managers.items():
                if process.is_running() and (told := self.ask(address)).is_leader and told.epoch > after:
                    found.append(address)
            return bool(found)

        eventually(is_there, f"a manager leads after epoch {after}", WAIT_S)
        return found[0]

    def epoch(self) -> int:
        return int(self.ask(self.leader()).epoch)

    def ask(self, address: str) -> LeaderResponse:
        try:
            with grpc.insecure_channel(address) as channel:
                told: LeaderResponse = LeadersStub(channel).Leader(LeaderRequest(), timeout=1.0)
                return told
        except grpc.RpcError:
            return LeaderResponse()

    def write(self, key: str) -> None:
        """Write through the gateway, which finds the leader; the gateway's view shows the value soon after."""
        url = f"http://127.0.0.1:{self.http_port}/v1/models/factor/routing"
        answer = httpx.put(url, json={"policy": "hash", "key": key}, timeout=30)
        assert answer.status_code == 200, answer.text
        eventually(lambda: httpx.get(url, timeout=30).json()["routing"]["key"] == key, "the gateway routes so", WAIT_S)

    def infer(self, number: float, model: str = "factor") -> float:
        try:
            url = f"http://127.0.0.1:{self.http_port}/v2/models/{model}/infer"
            answer = httpx.post(url, json=floats_json(number), timeout=30)
        except httpx.HTTPError:
            return 0.0
        return float(answer.json()["outputs"][0]["data"][0]) if answer.status_code == 200 else 0.0

    def stored(self, key: str) -> Record | None:
        async def read() -> Record | None:
            store = EtcdMetadataStore.from_url(self.etcd.url, 20.0)
            try:
                return await store.get(key)
            finally:
                await store.close()

        return asyncio.run(read())

    def _manage(self, port: int) -> HostProcess:
        flags = ("--join", self.etcd.url, "--bind", f"127.0.0.1:{port}", "--models", str(self.folder / "models"))
        return self._start("manager", f"m{port}", *flags, *HEALTH_PORTS)

    def _start(self, role: str, node: str, *flags: str) -> HostProcess:
        folder = self.folder / node
        command = [sys.executable, "-m", "penstock", role, "--node", node, "--data-dir", str(folder / "data"), *flags]
        env = {"PENSTOCK_TELEMETRY__LOG_FORMAT": "json", "PENSTOCK_REGISTRY__OBJECTS": str(self.folder / "objects")}
        return HostProcess(command, folder / "log", env)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedCluster]:
    folder = tmp_path_factory.mktemp("managers")
    write_factor(folder / "models", "factor", 2.0)
    with Etcd(folder / "etcd") as etcd:
        started = ManagedCluster(folder, etcd)
        try:
            yield started
        finally:
            started.close()


def test_a_follower_refuses_writes_and_names_the_leader(cluster: ManagedCluster) -> None:
    leader = cluster.leader()
    follower = next(address for address in cluster.managers if address != leader)
    with grpc.insecure_channel(follower) as channel:
        answer = ManagerStub(channel).Unload(pb.UnloadRequest(model="factor"), timeout=20)
    assert answer.failure.code == "not_leader"
    assert answer.failure.fields["leader"] == leader
    assert cluster.infer(1.0) == 2.0


def test_another_manager_leads_after_the_leader_is_killed(cluster: ManagedCluster) -> None:
    cluster.write("before")
    leader, epoch = cluster.leader(), cluster.epoch()
    files, manifest = uploaded(cluster.folder / "uploads")
    asyncio.run(send_some(leader, manifest, files))
    cluster.managers[leader].kill()
    asyncio.run(push_and_deploy(cluster, leader, manifest, files))
    cluster.write("after")
    assert cluster.leader(after=epoch) != leader
    assert cluster.infer(2.0) == 4.0
    record = cluster.stored("routing/factor")
    assert record is not None
    assert json.loads(record.value)["key"] == "after"
    cluster.restart(leader)
    cluster.write("with all")


def uploaded(folder: Path) -> tuple[dict[str, Path], Manifest]:
    """Return the files by their SHA-256, and their manifest."""
    write_factor(folder, "factor3", 3.0)
    (folder / "factor3" / "1" / "large.bin").write_bytes(secrets.token_bytes(3 * CHUNK_BYTES))
    names = ("model.yaml", "1/model.onnx", "1/large.bin")
    data = {name: (folder / "factor3" / name).read_bytes() for name in names}
    return write_files(folder / "factor3", data), manifest_of(data, "factor3")


async def send_some(address: str, manifest: Manifest, files: dict[str, Path]) -> None:
    """Send at most a piece of each file, so that one is incomplete."""
    async with grpc.aio.insecure_channel(address) as channel:
        registry = ModelRegistryStub(channel)
        begun = await registry.Begin(registry_pb2.BeginUpload(manifest=manifest.encoded), timeout=20)
        chunks = []
        for sha256, file in files.items():
            start = registry_pb2.UploadStart(upload_id=begun.upload_id, sha256=sha256)
            data = file.read_bytes()[:CHUNK_BYTES]
            chunks += [registry_pb2.UploadChunk(start=start), registry_pb2.UploadChunk(data=data)]
        state = await registry.Upload(iter(chunks), timeout=20)
        assert [file.offset < file.size_bytes for file in state.files].count(True) == 1


async def push_and_deploy(cluster: ManagedCluster, dead: str, manifest: Manifest, files: dict[str, Path]) -> None:
    """Check that the registry survives a manager: complete files stay, and a pushed version can be deployed."""
    managers = [dead, *(address for address in cluster.managers if address != dead)]
    sent: list[int] = []
    async with RegistryClient(",".join(managers)) as client:
        made = await client.push(manifest, files, on_progress=sent.append)
        assert 0 < sent[0] < CHUNK_BYTES, "the large file is sent again, and no other file"
        await client.set_alias("factor3", "stable", "1")
        with ClusterClient(managers, 30.0) as asking:
            spec = cluster_pb2.BlockSpec(model="factor3", version="1", source="registry")
            asked = cluster_pb2.DeployBlockRequest(spec=spec, wait_s=WAIT_S)
            await asyncio.to_thread(asking.call, "DeployBlock", asked, WAIT_S)
            await client.set_alias("factor3", "stable", "")
            with pytest.raises(Conflict, match="blk-"):
                await client.delete("factor3", "1")
            told = await asyncio.to_thread(asking.call, "Events", cluster_pb2.EventsRequest(subject="factor3"))
        assert [event.kind for event in told.events][:2] == ["model_registered", "model_alias"]
        await pull(client, made.digest, "1", cluster.folder / "pulled")
    eventually(lambda: cluster.infer(2.0, "factor3") == 6.0, "the gateway has heard of it", WAIT_S)
    pulled = {hashlib.sha256(file.read_bytes()).hexdigest() for file in (cluster.folder / "pulled").rglob("*.*")}
    assert pulled == set(files)


def test_a_suspended_leader_is_deposed(cluster: ManagedCluster) -> None:
    leader, epoch = cluster.leader(), cluster.epoch()
    stopped = cluster.managers[leader]
    stopped.signal(signal.SIGSTOP)
    try:
        cluster.write("while it is stopped")
        assert cluster.leader(after=epoch) != leader
    finally:
        stopped.signal(signal.SIGCONT)
    eventually(lambda: stopped.lines("term_ended"), "it knows that it leads no more", WAIT_S)
    assert not cluster.ask(leader).is_leader
    with grpc.insecure_channel(leader) as channel:
        answer = ManagerStub(channel).Unload(pb.UnloadRequest(model="factor"), timeout=20)
    assert answer.failure.code == "not_leader"

    async def write_as_it_was() -> None:
        store = EtcdMetadataStore.from_url(cluster.etcd.url, 20.0)
        try:
            await store.commit([Write("routing/factor", None)], [Compare(LEADER_KEY, epoch)])
        finally:
            await store.close()

    with pytest.raises(Conflict):
        asyncio.run(write_as_it_was())
    assert cluster.infer(3.0) == 6.0


def test_the_cluster_survives_the_loss_of_an_etcd_node(cluster: ManagedCluster) -> None:
    for node in cluster.etcd.nodes:
        node.kill()
        cluster.write(f"without {node.name}")
        assert cluster.infer(4.0) == 8.0
        node.start(cluster.etcd.nodes)
        cluster.etcd.wait_until_healthy()
    workers = cluster.folder / "hand" / "log"
    assert workers.read_text().count('"event": "loaded"') == 2, "the worker loaded each of its models once"
