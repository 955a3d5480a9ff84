"""Who comes in at a gateway's sockets for other hosts: whose key was told, and no stranger."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.waiting import until_seen
from penstock.wire.allowed_keys import MAX_WAITING, AllowedKeys
from penstock.wire.beats import GatewayHeart, WorkerHeart
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.endpoints import Endpoint, split_key
from penstock.wire.sockets import DealerSocket, RouterSocket

ANY_PORT = Endpoint("tcp://127.0.0.1:0")
SOON_S = 0.3  # in which a caller that is let in has long been heard


class Door:
    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.allowed = AllowedKeys()
        self.router = RouterSocket(lambda identity, frames: self.heard.append(identity))
        self.keys = CurveKeys()
        self.endpoint = self.router.bind(ANY_PORT, self.keys)
        self.callers: list[DealerSocket] = []

    def call(self, name: bytes, keys: CurveKeys | None, endpoint: str = "") -> DealerSocket:
        dealer = DealerSocket(lambda frames: None, name)
        dealer.connect(endpoint or self.endpoint, keys=keys)
        dealer.send([b"hello"])
        self.callers.append(dealer)
        return dealer

    def close(self) -> None:
        for caller in self.callers:
            caller.close()
        self.router.close()
        self.allowed.close()


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    made = Door()
    yield made
    made.close()


async def test_whoever_was_told_of_comes_in(door: Door) -> None:
    worker = CurveKeys()
    door.allowed.allow([worker.text])
    door.call(b"worker", worker)
    await until_seen(lambda: door.heard == [b"worker"], "it is heard")


async def test_strangers_are_not_heard(door: Door) -> None:
    worker = CurveKeys()
    door.allowed.allow([worker.text])
    where, _ = split_key(door.endpoint)
    door.call(b"plain", None, where)
    door.call(b"stranger", CurveKeys())
    door.call(b"of another server", worker, f"{where}#{CurveKeys().text}")
    await asyncio.sleep(SOON_S)
    assert door.heard == []


async def test_one_that_is_told_of_a_moment_later_comes_in_then(door: Door) -> None:
    worker = CurveKeys()
    door.call(b"worker", worker)
    await asyncio.sleep(SOON_S)
    assert door.heard == []
    door.allowed.allow([worker.text])
    await until_seen(lambda: door.heard == [b"worker"], "it is heard")


async def test_until_somebody_is_allowed_nobody_is(door: Door) -> None:
    door.allowed.close()  # as if nobody answered ZeroMQ
    door.call(b"worker", CurveKeys())
    await asyncio.sleep(SOON_S)
    assert door.heard == []
    door.allowed = AllowedKeys()


async def test_within_a_machine_nothing_is_asked(door: Door, tmp_path: Path) -> None:
    router = RouterSocket(lambda identity, frames: door.heard.append(identity))
    endpoint = router.bind(Endpoint(f"ipc://{tmp_path / 'door.ipc'}"), door.keys)
    assert split_key(endpoint)[1] == ""
    door.call(b"neighbour", CurveKeys(), endpoint)
    await until_seen(lambda: door.heard == [b"neighbour"], "it is heard")
    router.close()


async def test_hearts_are_encrypted_too(door: Door) -> None:
    worker_keys, stranger = CurveKeys(), CurveKeys()
    door.allowed.allow([worker_keys.text])
    gateway = GatewayHeart(ANY_PORT, 0.05, door.keys)
    worker, other = WorkerHeart(b"worker", 0.05, worker_keys), WorkerHeart(b"stranger", 0.05, stranger)
    try:
        for identity in (b"worker", b"stranger"):
            gateway.silences.follow(identity)
        for heart in (worker, other):
            heart.meet(gateway.endpoint)
        await until_seen(lambda: gateway.silences.of(b"stranger") > SOON_S, "some time has passed")
        assert gateway.silences.of(b"worker") < gateway.silences.of(b"stranger")
        assert worker.silences.of(gateway.endpoint) < other.silences.of(gateway.endpoint)
    finally:
        for each in (worker, other, gateway):
            each.close()


async def test_those_who_wait_are_bounded(door: Door) -> None:
    for number in range(MAX_WAITING + 10):
        question = [b"", b"1.0", b"1", b"penstock", b"127.0.0.1", b"", b"CURVE", number.to_bytes(32, "big")]
        door.allowed._on_question(number.to_bytes(4, "big"), list(question))
    assert len(door.allowed._waiting) <= MAX_WAITING


def test_a_secret_key_is_never_printed() -> None:
    assert "secret" not in repr(CurveKeys())
