"""A dispatcher, and scripted workers that talk to it over real sockets."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry

from benchmarks.waiting import until
from penstock.core.blocks import BlockDescription
from penstock.core.config import DataPlane
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.core.settings import BlockSettings
from penstock.core.tensors import Buffer, Tensor
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.dispatcher import Dispatcher
from penstock.router.lanes.socket_lane import SocketLane
from penstock.telemetry.metrics import RouterMetrics
from penstock.wire import job_messages
from penstock.wire.encodings import encode_description
from penstock.wire.sockets import DealerSocket
from penstock.wire.zmq_endpoints import Endpoint
from tests.heard import ReceivedMessages

TENSOR = Tensor("x", "FP32", (1, 1), b"\0\0\0\0")
ANSWER = Tensor("y", "FP32", (1, 1), b"\0\0\x80\x3f")


def block(block_id: str = "blk", **settings: object) -> BlockDescription:
    described = BlockSettings.model_validate(settings)
    return BlockDescription(block_id, "m", "1", "onnxruntime_onnx", "fp32", (), (), 8, 1, described)


def request(request_id: str = "r") -> InferRequest:
    return InferRequest("m", [TENSOR], "1", request_id)


def offer(described: BlockDescription, credits: int = 1, **more: object) -> pb.BlockOffer:
    return pb.BlockOffer(
        block_id=described.block_id,
        credits=credits,
        description=encode_description(described),
        **more,  # type: ignore[arg-type]
    )


class Peer(ReceivedMessages):
    """A worker's end of the socket, which records received messages."""

    def __init__(self, endpoint: str, name: str) -> None:
        super().__init__()
        self.identity = name.encode()
        self.name = name
        self._dealer = DealerSocket(self.hear, self.identity)
        self._dealer.connect(endpoint)
        self.close = self._dealer.close

    async def get_job(self) -> pb.Job:
        return (await self.get("job"))[0].job

    async def get_refused(self) -> pb.Refused:
        return (await self.get("refused"))[0].refused

    def send(self, **kind: object) -> None:
        self._dealer.send(job_messages.encode(pb.Header(**kind)))  # type: ignore[arg-type]

    def send_raw(self, message: list[Buffer]) -> None:
        self._dealer.send(message)

    async def join(self, *offers: pb.BlockOffer, **hello: object) -> pb.Welcome:
        self.say_hello(*offers, **hello)
        return (await self.get("welcome"))[0].welcome

    def say_hello(self, *offers: pb.BlockOffer, **hello: object) -> None:
        said = {"protocol": job_messages.PROTOCOL, "worker_id": self.name, "host": "elsewhere", "pid": 1, **hello}
        self.send(hello=pb.Hello(blocks=offers, **said))  # type: ignore[arg-type]

    def answer(self, job: pb.Job, is_partial: bool = False, outputs: Iterable[Tensor] = (ANSWER,)) -> None:
        timing = Timing(1, 2, 3, 4, 5)
        encoded = job_messages.encode_result(job.job_id, job.attempt, list(outputs), timing, {"p": 7}, is_partial)
        self._dealer.send(encoded)


class Bed:
    """A listening dispatcher, with its reports of workers and its counts."""

    def __init__(self, folder: Path, settings: DataPlane) -> None:
        self.changes = 0
        self.lost: list[tuple[bytes, set[str]]] = []
        self._registry = CollectorRegistry()
        metrics = RouterMetrics(self._registry)
        self.dispatcher = Dispatcher(
            metrics,
            self._on_change,
            lambda worker, blocks: self.lost.append((worker, set(blocks))),
        )
        lane = SocketLane("gateway-0", settings, metrics, self.dispatcher, "zone-a")
        self.dispatcher.add(lane)
        self.dispatcher.start()
        self._endpoint = lane.listen(Endpoint(f"ipc://{folder}/d.ipc"))
        self._peers: list[Peer] = []
        self._asked: list[asyncio.Task[InferResponse]] = []
        self._is_stopped = False

    def _on_change(self) -> None:
        self.changes += 1

    def peer(self, name: str) -> Peer:
        self._peers.append(Peer(self._endpoint, name))
        return self._peers[-1]

    async def worker(self, name: str = "a", *offers: pb.BlockOffer, **hello: object) -> Peer:
        """Return a worker that has joined, with one credit for `blk` unless offers are given."""
        peer = self.peer(name)
        await peer.join(*(offers or (offer(block()),)), **hello)
        return peer

    def ask(
        self, described: BlockDescription | None = None, timeout_s: float = 60.0, asked: InferRequest | None = None
    ) -> asyncio.Task[InferResponse]:
        deadline = asyncio.get_running_loop().time() + timeout_s
        running = self.dispatcher.run(described or block(), asked or request(), deadline)
        self._asked.append(asyncio.create_task(running))
        return self._asked[-1]

    def counted(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"penstock_{name}_total", labels) or 0.0

    async def until_counted(self, name: str, count: float = 1.0, **labels: str) -> None:
        await until(lambda: self.counted(name, **labels) >= count)

    async def stop(self) -> None:
        """Stop once, even if a test has stopped it before its end."""
        if not self._is_stopped:
            self._is_stopped = True
            await self.dispatcher.stop()

    async def close(self) -> None:
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        await self.stop()
        for peer in self._peers:
            peer.close()
