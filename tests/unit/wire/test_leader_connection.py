"""Calls go to the leader, and are repeated if it changes."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from penstock.core.errors import NotLeader, Unavailable, UnknownModel
from penstock.pb.v1 import manager_pb2 as pb
from penstock.pb.v1.manager_pb2_grpc import ManagerServicer, ManagerStub, add_ManagerServicer_to_server
from penstock.telemetry.background import BackgroundTasks
from penstock.wire import leader_connection as leader_module
from penstock.wire.channels import Channels
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.credentials.tls_files import TlsFiles
from penstock.wire.failures import encode_failure
from penstock.wire.leader_connection import FixedLeader, LeaderAddress, LeaderClient
from tests.tls import TestAuthority


class ToldLeader:
    """A source of the leader that the test controls."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[LeaderAddress] = asyncio.Queue()
        self.hurries = 0

    def tell(self, address: str, epoch: int) -> None:
        self._told.put_nowait(LeaderAddress(address, epoch))

    async def follow(self) -> AsyncIterator[LeaderAddress]:
        while True:
            yield await self._told.get()

    def search_now(self) -> None:
        self.hurries += 1

    async def close(self) -> None:
        pass


class FakeManager(ManagerServicer):
    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.hangs = False
        self.calls = 0
        self.address = ""

    async def Load(self, request: pb.LoadRequest, context: grpc.aio.ServicerContext) -> pb.LoadResponse:
        self.calls += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.failure is not None:
            return pb.LoadResponse(failure=encode_failure(self.failure))  # type: ignore[arg-type]
        return pb.LoadResponse()


@pytest.fixture
async def managers() -> AsyncIterator[list[FakeManager]]:
    found, servers = [], []
    for _ in range(2):
        server, manager = grpc.aio.server(), FakeManager()
        add_ManagerServicer_to_server(manager, server)
        manager.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        found.append(manager)
        servers.append(server)
    yield found
    for server in servers:
        await server.stop(None)


@pytest.fixture
def source() -> ToldLeader:
    return ToldLeader()


@pytest.fixture
async def leader(source: ToldLeader) -> AsyncIterator[LeaderClient]:
    opened = LeaderClient(source)
    yield opened
    await opened.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "LEADER_TIMEOUT_S", 0.3)


async def load(leader: LeaderClient) -> pb.LoadResponse:
    return await leader.call(lambda channel, time_s: ManagerStub(channel).Load(pb.LoadRequest(), timeout=time_s), 60.0)


async def test_a_call_waits_for_a_leader(managers: list[FakeManager], source: ToldLeader, leader: LeaderClient) -> None:
    loading = asyncio.create_task(load(leader))
    await asyncio.sleep(0)
    source.tell(managers[0].address, 1)
    await loading
    assert leader.address == managers[0].address


async def test_a_refusal_of_the_leader_is_raised(
    managers: list[FakeManager], source: ToldLeader, leader: LeaderClient
) -> None:
    source.tell(managers[0].address, 1)
    managers[0].failure = UnknownModel("no such")
    with pytest.raises(UnknownModel, match="no such"):
        await load(leader)
    assert managers[0].calls == 1


async def test_a_call_is_repeated_at_the_next_leader(
    managers: list[FakeManager], source: ToldLeader, leader: LeaderClient
) -> None:
    source.tell(managers[0].address, 1)
    managers[0].hangs = True
    loading = asyncio.create_task(load(leader))
    async with asyncio.timeout(60):
        while not managers[0].calls:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    source.tell(managers[1].address, 2)
    await loading
    assert managers[1].calls == 1


async def test_a_manager_that_does_not_lead_is_asked_again_until_a_leader_is_found(
    managers: list[FakeManager], source: ToldLeader, leader: LeaderClient
) -> None:
    source.tell(managers[0].address, 1)
    managers[0].failure = NotLeader("another leads")
    loading = asyncio.create_task(load(leader))
    async with asyncio.timeout(60):
        while managers[0].calls < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert source.hurries
    source.tell(managers[1].address, 2)
    await loading


@pytest.mark.usefixtures("impatient")
async def test_without_a_leader_a_call_ends_in_time(
    managers: list[FakeManager], source: ToldLeader, leader: LeaderClient
) -> None:
    with pytest.raises(Unavailable, match="no manager of the cluster answers"):
        await load(leader)
    source.tell("127.0.0.1:1", 1)
    with pytest.raises(Unavailable, match="does not answer"):
        await load(leader)
    source.tell(managers[0].address, 2)
    managers[0].failure = NotLeader("another leads")
    with pytest.raises(NotLeader, match="another leads"):
        await load(leader)


async def test_a_stream_ends_when_the_leader_changes(
    managers: list[FakeManager], source: ToldLeader, leader: LeaderClient
) -> None:
    source.tell(managers[0].address, 1)
    ended = asyncio.Event()

    async def stay(channel: grpc.aio.Channel) -> None:
        try:
            source.tell(managers[0].address, 2)
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(NotLeader) as moved:
        await leader.run_with_leader(stay)
    assert moved.value.reason == "moved"
    assert ended.is_set()


async def test_a_failing_channel_is_reopened_with_new_certificates(tmp_path: Path) -> None:
    """The authority changes on both sides; open channels used the former one."""
    old, new = TestAuthority(tmp_path / "old"), TestAuthority(tmp_path / "new")
    here, there = tmp_path / "here", tmp_path / "there"

    def install(authority: TestAuthority) -> None:
        for folder in (here, there):
            shutil.copytree(authority.folder, folder, dirs_exist_ok=True)

    def files(folder: Path) -> TlsFiles:
        return TlsFiles(*(str(folder / name) for name in ("server.pem", "server-key.pem", "ca.pem")))

    async def serve(port: int) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=(("grpc.so_reuseport", 1),))
        add_ManagerServicer_to_server(FakeManager(), server)
        port = Certificates(files(there), "required").add_port(server, f"127.0.0.1:{port}")
        await server.start()
        return server, port

    install(old)
    server, port = await serve(0)
    leader = LeaderClient(FixedLeader(f"127.0.0.1:{port}"), Channels(tls=files(here)))

    async def load(channel: grpc.aio.Channel, left_s: float) -> pb.LoadResponse:
        answer: pb.LoadResponse = await ManagerStub(channel).Load(pb.LoadRequest(model="m"), timeout=left_s)
        return answer

    await leader.call(load, 10.0)
    install(new)
    await server.stop(0)
    server, _ = await serve(port)
    await leader.call(load, 30.0)
    await leader.close()
    await server.stop(0)


async def test_run_once_can_be_repeated_after_every_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "RETRY_S", 0.0)
    monkeypatch.setattr(leader_module, "MAX_RETRY_S", 0.0)
    leader = LeaderClient(FixedLeader("127.0.0.1:1"))
    ended, over = [RuntimeError("a bug"), asyncio.CancelledError(), None], asyncio.Event()

    async def act(channel: grpc.aio.Channel) -> None:
        if not ended:
            over.set()
            await asyncio.Event().wait()
        if (error := ended.pop(0)) is not None:
            raise error

    tasks = BackgroundTasks("test")
    attending = tasks.supervise("attending", lambda: leader.run_once(act), deadline_s=None)
    await asyncio.wait_for(over.wait(), 30)
    await asyncio.wait_for(tasks.close(), 30)
    assert attending.cancelled()
    await leader.close()
