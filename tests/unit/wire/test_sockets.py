"""Two sockets on one loop: addressing, large frames, and handlers that fail."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.waiting import until
from penstock.core.errors import ConfigError
from penstock.core.tensors import Buffer
from penstock.wire.endpoints import Endpoint
from penstock.wire.sockets import DRAIN_AT_ONCE, DealerSocket, RouterSocket


class Pair:
    def __init__(self, folder: Path) -> None:
        self.at_router: list[list[bytes]] = []
        self.at_dealer: list[list[bytes]] = []
        self.failing = 0
        self.router = RouterSocket(self._on_router)
        endpoint = self.router.bind(Endpoint(f"ipc://{folder}/x.ipc"))
        self.dealer = DealerSocket(lambda frames: self.at_dealer.append([bytes(f) for f in frames]), b"worker")
        self.dealer.connect(endpoint)

    def _on_router(self, identity: bytes, frames: list[Buffer]) -> None:
        if self.failing:
            self.failing -= 1
            raise ValueError("a handler's own fault")
        self.at_router.append([identity, *(bytes(frame) for frame in frames)])

    async def wait(self, received: list[list[bytes]], count: int) -> None:
        await until(lambda: len(received) >= count, f"{count} have come")

    def close(self) -> None:
        self.dealer.close()
        self.router.close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


async def test_the_worker_speaks_first_and_is_answered_by_identity(folder: Path) -> None:
    pair = Pair(folder)
    assert not pair.router.send(b"nobody", [b"x"])
    assert pair.dealer.send([b"hello", b""])
    await pair.wait(pair.at_router, 1)
    assert pair.at_router == [[b"worker", b"hello", b""]]
    assert pair.router.send(b"worker", [b"job", b"t" * 1_000_000])
    await pair.wait(pair.at_dealer, 1)
    assert pair.at_dealer == [[b"job", b"t" * 1_000_000]]
    pair.close()


async def test_more_messages_than_one_drain_takes_all_arrive_in_order(folder: Path) -> None:
    pair = Pair(folder)
    count = DRAIN_AT_ONCE * 3 + 5
    for number in range(count):
        pair.dealer.send([str(number).encode()])
    await pair.wait(pair.at_router, count)
    assert [int(frames[1]) for frames in pair.at_router] == list(range(count))
    pair.close()


async def test_a_handler_that_fails_does_not_hold_up_the_rest(folder: Path) -> None:
    pair = Pair(folder)
    seen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context["exception"]))
    pair.failing = 1
    for number in range(5):
        pair.dealer.send([str(number).encode()])
    await pair.wait(pair.at_router, 4)
    assert [frames[1] for frames in pair.at_router] == [b"1", b"2", b"3", b"4"]
    assert [type(error) for error in seen] == [ValueError]
    pair.close()


async def test_a_connection_that_broke_is_told_and_comes_back(folder: Path) -> None:
    breaks: list[int] = []
    heard: list[bytes] = []
    router = RouterSocket(lambda identity, frames: heard.append(bytes(frames[0])))
    endpoint = router.bind(Endpoint("tcp://127.0.0.1:0"))
    dealer = DealerSocket(lambda frames: None, b"worker")
    dealer.connect(endpoint, lambda: breaks.append(1))
    dealer.send([b"one"])
    await until(lambda: heard == [b"one"])
    assert breaks == []
    router.close()
    await until(lambda: breaks)
    again = RouterSocket(lambda identity, frames: heard.append(bytes(frames[0])))
    again.bind(Endpoint(endpoint))
    dealer.send([b"two"])
    await until(lambda: heard == [b"one", b"two"])
    dealer.close()
    again.close()


async def test_a_port_that_is_taken_is_told(folder: Path) -> None:
    first, second = (RouterSocket(lambda identity, frames: None) for _ in range(2))
    taken = first.bind(Endpoint("tcp://127.0.0.1:0"))
    with pytest.raises(ConfigError, match="choose another --bind"):
        second.bind(Endpoint(taken))
    first.close()
    second.close()
