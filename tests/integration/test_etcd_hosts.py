"""An etcd node that is cut off from its peers but not from its clients: they continue with the other nodes."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from benchmarks.etcd import NODES, Etcd
from benchmarks.hosts import Hosts
from penstock.storage.metadata.etcd import EtcdMetadataStore


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(NODES) as running:
        yield running


@pytest.fixture
def etcd(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd"), hosts) as running:
        yield running


async def test_writes_watches_and_leases_survive_a_node_that_is_cut_off(hosts: Hosts, etcd: Etcd) -> None:
    store = EtcdMetadataStore.from_url(etcd.url, 30.0)
    lease = await store.grant(30.0)
    revision = await store.put("leader", b"me", lease=lease)
    heard: list[bytes | None] = []

    async def watch() -> None:
        async with aclosing(store.watch("number", revision)) as watching:  # type: ignore[type-var]
            async for changes in watching:
                heard.extend(change.value for change in changes)

    watching = asyncio.create_task(watch())
    for victim in range(NODES):  # whichever of them the store uses
        cut = [number for number in range(NODES) if number != victim]
        await asyncio.to_thread(hosts.separate, victim, *cut)
        for number in range(3):
            await store.put("number", f"{victim}.{number}".encode())
            await store.keep_alive(lease)
        async with asyncio.timeout(60):
            while heard[-1:] != [f"{victim}.2".encode()]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.to_thread(hosts.unite, victim, *cut)
        await asyncio.to_thread(etcd.wait_until_healthy)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert heard == [f"{victim}.{number}".encode() for victim in range(NODES) for number in range(3)]
    leader = await store.get("leader")
    assert leader is not None
    assert leader.revision == revision
    await store.close()
