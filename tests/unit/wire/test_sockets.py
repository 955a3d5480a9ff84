"""Two sockets on one event loop: addressing, large messages, failing handlers, and the parts of pyzmq in use."""

import asyncio
from pathlib import Path

import pytest
import zmq
from zmq.backend import Socket as RawSocket

from benchmarks.waiting import until
from penstock.core.errors import ConfigError
from penstock.core.tensors import Buffer
from penstock.wire.sockets import MAX_READS_AT_ONCE, ZERO_COPY_BYTES, DealerSocket, RouterSocket
from penstock.wire.zmq_endpoints import Endpoint


class Pair:
    def __init__(self, folder: Path) -> None:
        self.at_router: list[list[bytes]] = []
        self.at_dealer: list[list[bytes]] = []
        self.failing = 0
        self.router = RouterSocket(self._on_router)
        endpoint = self.router.bind(Endpoint(f"ipc://{folder}/x.ipc"))
        self.dealer = DealerSocket(lambda parts: self.at_dealer.append([bytes(part) for part in parts]), b"worker")
        self.dealer.connect(endpoint)

    def _on_router(self, identity: bytes, parts: list[Buffer]) -> None:
        if self.failing:
            self.failing -= 1
            raise ValueError("a handler's own fault")
        self.at_router.append([identity, *(bytes(part) for part in parts)])

    async def wait(self, received: list[list[bytes]], count: int) -> None:
        await until(lambda: len(received) >= count, f"{count} have come")

    def close(self) -> None:
        self.dealer.close()
        self.router.close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


async def test_the_dealer_sends_first_and_is_answered_by_identity(folder: Path) -> None:
    pair = Pair(folder)
    assert not pair.router.send(b"nobody", [b"x"])
    assert pair.dealer.send([b"hello", b""])
    await pair.wait(pair.at_router, 1)
    assert pair.at_router == [[b"worker", b"hello", b""]]
    assert pair.router.send(b"worker", [b"job", b"t" * 1_000_000])
    await pair.wait(pair.at_dealer, 1)
    assert pair.at_dealer == [[b"job", b"t" * 1_000_000]]
    pair.close()


async def test_more_messages_than_one_drain_reads_arrive_in_order(folder: Path) -> None:
    pair = Pair(folder)
    count = MAX_READS_AT_ONCE * 3 + 5
    for number in range(count):
        pair.dealer.send([str(number).encode()])
    await pair.wait(pair.at_router, count)
    assert [int(parts[1]) for parts in pair.at_router] == list(range(count))
    pair.close()


async def test_messages_after_a_failing_handler_are_handled(folder: Path) -> None:
    pair = Pair(folder)
    seen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context["exception"]))
    pair.failing = 1
    for number in range(5):
        pair.dealer.send([str(number).encode()])
    await pair.wait(pair.at_router, 4)
    assert [parts[1] for parts in pair.at_router] == [b"1", b"2", b"3", b"4"]
    assert [type(error) for error in seen] == [ValueError]
    pair.close()


async def test_the_compiled_zmq_socket_sends_and_receives_multipart_messages(folder: Path) -> None:
    """Check zmq.backend.Socket, which is not public: its base class, `send`, `recv`, `get` and `more`."""
    assert issubclass(zmq.Socket, RawSocket)
    sizes = (1, ZERO_COPY_BYTES - 1, ZERO_COPY_BYTES, 3 * ZERO_COPY_BYTES)
    message = [bytes([index]) * size for index, size in enumerate(sizes)]
    at_router: list[list[bytes]] = []
    at_dealer: list[list[bytes]] = []
    router = RouterSocket(lambda identity, parts: at_router.append([identity, *map(bytes, parts)]))
    dealer = DealerSocket(lambda parts: at_dealer.append([bytes(part) for part in parts]), b"worker")
    dealer.connect(router.bind(Endpoint("tcp://127.0.0.1:0")))
    assert dealer.send(message)
    await until(lambda: at_router == [[b"worker", *message]])
    assert router.send(b"worker", message)
    assert not router.send(b"stranger", message)
    await until(lambda: at_dealer == [message])
    dealer.close()
    router.close()


async def test_a_broken_connection_is_reported_and_reopened(folder: Path) -> None:
    breaks: list[int] = []
    received: list[bytes] = []
    router = RouterSocket(lambda identity, parts: received.append(bytes(parts[0])))
    endpoint = router.bind(Endpoint("tcp://127.0.0.1:0"))
    dealer = DealerSocket(lambda parts: None, b"worker")
    dealer.connect(endpoint, lambda: breaks.append(1))
    dealer.send([b"one"])
    await until(lambda: received == [b"one"])
    assert breaks == []
    router.close()
    await until(lambda: breaks)
    again = RouterSocket(lambda identity, parts: received.append(bytes(parts[0])))
    again.bind(Endpoint(endpoint))
    dealer.send([b"two"])
    await until(lambda: received == [b"one", b"two"])
    dealer.close()
    again.close()


async def test_binding_to_a_used_port_fails(folder: Path) -> None:
    first, second = (RouterSocket(lambda identity, parts: None) for _ in range(2))
    taken = first.bind(Endpoint("tcp://127.0.0.1:0"))
    with pytest.raises(ConfigError, match="choose another --bind"):
        second.bind(Endpoint(taken))
    first.close()
    second.close()
