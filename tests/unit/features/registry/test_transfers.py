"""Files over interrupted connections, and in a real S3 server."""

import hashlib
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest

from benchmarks.waiting import until
from penstock.client.registry import RegistryClient
from penstock.core.config import load_config
from penstock.features.registry.pull import pull
from penstock.features.registry.sources import ModelSources
from penstock.pb.v1 import registry_pb2 as pb
from penstock.pb.v1 import registry_pb2_grpc
from penstock.storage.objects.object_store import open_objects
from tests.chaos.cluster.fault_proxy import FaultProxy
from tests.registry_bed import RegistryBed, manifest_of, model_of, registry_bed, write_files
from tests.s3 import S3Server

MIB = 1024 * 1024
SIZE = 12 * MIB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3") / "buckets") as server:
        yield server


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[RegistryBed]:
    async with registry_bed(tmp_path / "data") as bed:
        yield bed


def port_of(bed: RegistryBed) -> int:
    return int(bed.address.rpartition(":")[2])


async def test_transfers_interrupted_twice_in_each_direction_resume_and_are_complete(
    bed: RegistryBed, tmp_path: Path
) -> None:
    data = secrets.token_bytes(SIZE)
    files = model_of(data)
    manifest = manifest_of(files)
    async with (
        FaultProxy(port_of(bed), [SIZE // 3, 2 * SIZE // 3]) as proxy,
        RegistryClient(f"127.0.0.1:{proxy.port}") as client,
    ):
        made = await client.push(manifest, write_files(tmp_path / "m", files))
        assert proxy.cut_count == 2
        assert proxy.sent_bytes < 2 * SIZE  # data in the sockets at a cut is sent again
    async with (
        FaultProxy(port_of(bed), [SIZE // 3, 2 * SIZE // 3]) as proxy,
        RegistryClient(f"127.0.0.1:{proxy.port}") as client,
    ):
        await pull(client, made.digest, "1", tmp_path / "pulled")
        assert proxy.cut_count == 2
        assert proxy.received_bytes < 2 * SIZE
    assert (tmp_path / "pulled" / "1" / "model.onnx").read_bytes() == data


async def test_if_one_manager_does_not_answer_another_is_asked(bed: RegistryBed, tmp_path: Path) -> None:
    files = model_of(b"weights")
    async with RegistryClient(f"127.0.0.1:1,{bed.address}") as client:
        assert (await client.push(manifest_of(files), write_files(tmp_path / "m", files))).version == "1"
    async with RegistryClient(f"127.0.0.1:1,{bed.address}") as client:
        assert (await client.find("m")).version == "1"


async def test_a_stalled_download_is_ended(tmp_path: Path) -> None:
    data = secrets.token_bytes(SIZE)
    files = model_of(data)
    sha256 = hashlib.sha256(data).hexdigest()
    async with registry_bed(tmp_path / "data", read_s=0.2) as bed:
        async with bed.client() as client:
            await client.push(manifest_of(files), write_files(tmp_path / "m", files))
        held = str(tmp_path / "data" / "objects")
        # Otherwise the client's library prefetches as much as it estimates that the network can carry.
        async with grpc.aio.insecure_channel(bed.address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
            call = registry_pb2_grpc.ModelRegistryStub(channel).Download(pb.DownloadRequest(sha256=sha256))
            assert len((await call.read()).data)
            await until(lambda: not any(file.path.startswith(held) for file in psutil.Process().open_files()))
            with suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() is not grpc.StatusCode.OK
        async with bed.client() as client:  # and a later call continues
            assert b"".join([piece async for piece in client.read(sha256, SIZE - 5)]) == data[-5:]


async def test_workers_read_the_files_of_a_registry_on_s3_from_the_store(server: S3Server, tmp_path: Path) -> None:
    url = server.url(secrets.token_hex(4))
    data = secrets.token_bytes(9 * MIB)
    files = {**model_of(data), "1/empty": b""}
    objects = open_objects(url, tmp_path, server.settings)
    async with registry_bed(tmp_path / "data", objects=objects) as bed, bed.client() as client:
        made = await client.push(manifest_of(files), write_files(tmp_path / "m", files))
        sha256 = hashlib.sha256(data).hexdigest()
        assert b"".join([piece async for piece in client.read(sha256, 5 * MIB)]) == data[5 * MIB :]
        config = load_config(
            data_dir=tmp_path / "worker", registry={"objects": url, "is_direct": True}, s3=server.settings.model_dump()
        )
        opened = await ModelSources(config).open(f"registry:{made.digest}")
        assert (opened.folder / "1" / "model.onnx").read_bytes() == data
        opened.close()
        await client.delete("m", "1")
        assert [found.key async for found in objects.list("blobs")] == []
        assert [found.key async for found in objects.list("manifests")] == []


async def test_a_worker_fetches_from_the_new_leader_after_a_change(bed: RegistryBed, tmp_path: Path) -> None:
    data = secrets.token_bytes(3 * MIB)
    files = model_of(data)
    async with bed.client() as client:
        made = await client.push(manifest_of(files), write_files(tmp_path / "m", files))
    leaders = iter(["", "127.0.0.1:1"])
    sources = ModelSources(load_config(data_dir=tmp_path / "worker"), lambda: next(leaders, bed.address))
    opened = await sources.open(f"registry:{made.digest}")
    assert (opened.folder / "1" / "model.onnx").read_bytes() == data
    opened.close()
