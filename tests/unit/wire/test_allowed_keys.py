"""Keys that a gateway's sockets for other hosts accept, and unknown keys that they refuse."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.waiting import until_seen
from penstock.wire.allowed_keys import MAX_WAITING_REQUESTS, AllowedKeys
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.heartbeats import GatewayHeartbeats, WorkerHeartbeats
from penstock.wire.sockets import DealerSocket, RouterSocket
from penstock.wire.zmq_endpoints import Endpoint, split_key

ANY_PORT = Endpoint("tcp://127.0.0.1:0")
SOON_S = 0.3  # a time after which messages of an admitted caller have long arrived


class Listener:
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
async def listener() -> AsyncIterator[Listener]:
    made = Listener()
    yield made
    made.close()


async def test_an_allowed_worker_is_admitted(listener: Listener) -> None:
    worker = CurveKeys()
    listener.allowed.allow([worker.text])
    listener.call(b"worker", worker)
    await until_seen(lambda: listener.heard == [b"worker"], "it is heard")


async def test_unknown_workers_are_refused(listener: Listener) -> None:
    worker = CurveKeys()
    listener.allowed.allow([worker.text])
    where, _ = split_key(listener.endpoint)
    listener.call(b"plain", None, where)
    listener.call(b"stranger", CurveKeys())
    listener.call(b"of another server", worker, f"{where}#{CurveKeys().text}")
    await asyncio.sleep(SOON_S)
    assert listener.heard == []


async def test_a_worker_that_is_allowed_later_is_admitted_then(listener: Listener) -> None:
    worker = CurveKeys()
    listener.call(b"worker", worker)
    await asyncio.sleep(SOON_S)
    assert listener.heard == []
    listener.allowed.allow([worker.text])
    await until_seen(lambda: listener.heard == [b"worker"], "it is heard")


async def test_without_allowed_keys_no_worker_is_admitted(listener: Listener) -> None:
    listener.allowed.close()  # as if no socket answered the ZeroMQ handshake
    listener.call(b"worker", CurveKeys())
    await asyncio.sleep(SOON_S)
    assert listener.heard == []
    listener.allowed = AllowedKeys()


async def test_sockets_within_a_machine_require_no_key(listener: Listener, tmp_path: Path) -> None:
    router = RouterSocket(lambda identity, frames: listener.heard.append(identity))
    endpoint = router.bind(Endpoint(f"ipc://{tmp_path / 'listener.ipc'}"), listener.keys)
    assert split_key(endpoint)[1] == ""
    listener.call(b"neighbour", CurveKeys(), endpoint)
    await until_seen(lambda: listener.heard == [b"neighbour"], "it is heard")
    router.close()


async def test_heartbeats_are_encrypted_too(listener: Listener) -> None:
    worker_keys, stranger = CurveKeys(), CurveKeys()
    listener.allowed.allow([worker_keys.text])
    gateway = GatewayHeartbeats(ANY_PORT, 0.05, listener.keys)
    worker, other = WorkerHeartbeats(b"worker", 0.05, worker_keys), WorkerHeartbeats(b"stranger", 0.05, stranger)
    try:
        for identity in (b"worker", b"stranger"):
            gateway.silence.track(identity)
        for heartbeats in (worker, other):
            heartbeats.add_gateway(gateway.endpoint)
        await until_seen(lambda: gateway.silence.seconds(b"stranger") > SOON_S, "some time has passed")
        assert gateway.silence.seconds(b"worker") < gateway.silence.seconds(b"stranger")
        assert worker.silence.seconds(gateway.endpoint) < other.silence.seconds(gateway.endpoint)
    finally:
        for each in (worker, other, gateway):
            each.close()


async def test_the_number_of_waiting_workers_is_limited(listener: Listener) -> None:
    for number in range(MAX_WAITING_REQUESTS + 10):
        question = [b"", b"1.0", b"1", b"penstock", b"127.0.0.1", b"", b"CURVE", number.to_bytes(32, "big")]
        listener.allowed._on_request(number.to_bytes(4, "big"), list(question))
    assert len(listener.allowed._waiting_requests) <= MAX_WAITING_REQUESTS


def test_a_secret_key_is_never_printed() -> None:
    assert "secret" not in repr(CurveKeys())
