"""An etcd node that its peers no longer reach, while its clients do: they go on with the others."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from benchmarks.etcd import EtcdNode
from benchmarks.hosts import Hosts
from benchmarks.waiting import eventually
from penstock.storage.metadata.etcd import EtcdMetadataStore

PORTS = (2379, 2380)
NODES = range(3)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(len(NODES)) as running:
        yield running


@pytest.fixture
def nodes(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EtcdNode]]:
    folder = tmp_path_factory.mktemp("etcd")
    inside = [("ip", "netns", "exec", hosts.name(number)) for number in NODES]
    found = [EtcdNode(f"e{n}", folder / f"e{n}", hosts.address(n), PORTS, inside[n]) for n in NODES]
    try:
        for node in found:
            node.start(found)
        eventually(lambda: all(node.is_healthy() for node in found), "every node of etcd is healthy", 60.0)
        yield found
    finally:
        for node in found:
            node.kill()


async def test_writes_watches_and_leases_outlive_a_node_that_is_cut_off(hosts: Hosts, nodes: list[EtcdNode]) -> None:
    store = EtcdMetadataStore([node.address for node in nodes], timeout_s=30.0)
    lease = await store.grant(30.0)
    revision = await store.put("leader", b"me", lease=lease)
    heard: list[bytes | None] = []

    async def watch() -> None:
        async with aclosing(store.watch("number", revision)) as watching:  # type: ignore[type-var]
            async for changes in watching:
                heard.extend(change.value for change in changes)

    watching = asyncio.create_task(watch())
    for victim in NODES:  # whichever of them the store uses
        cut = [number for number in NODES if number != victim]
        await asyncio.to_thread(hosts.separate, victim, *cut)
        for number in range(3):
            await store.put("number", f"{victim}.{number}".encode())
            await store.keep_alive(lease)
        async with asyncio.timeout(60):
            while heard[-1:] != [f"{victim}.2".encode()]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.to_thread(hosts.unite, victim, *cut)
        await asyncio.to_thread(
            eventually, lambda: all(node.is_healthy() for node in nodes), "every node is healthy", 60.0
        )
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert heard == [f"{victim}.{number}".encode() for victim in NODES for number in range(3)]
    leader = await store.get("leader")
    assert leader is not None
    assert leader.revision == revision
    await store.close()
