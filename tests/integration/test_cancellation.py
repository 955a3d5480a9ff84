"""A client that disconnects cancels its request, in the gateway's queue and on the worker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import answered, floats, floats_json, write_slow

WAIT_S = 90.0
LONG = 6_000.0  # rounds of the slow model: some seconds
# One instance that takes one row: of three requests one runs, one waits on the worker, one in the gateway.
ONE_BY_ONE = "batching: {max_rows: 1}\ninstances: {count: 1}\ntimeouts: {request_s: 600}\n"

Leave = Callable[[], Awaitable[None]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("cancellation")
    write_slow(folder / "models", "slow", ONE_BY_ONE)
    with ServerProcess(folder / "models", folder) as running:
        yield running


@dataclass(slots=True)
class Counts:
    """Numbers of cancelled requests so far."""

    in_gateway: float
    on_worker: float


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One protocol: how to send a long request, and how to leave it."""

    server: ServerProcess
    protocol: str
    send: Callable[[], Awaitable[Leave]]

    def counts(self) -> Counts:
        return Counts(
            self.server.metric("penstock_requests", model="slow", protocol=self.protocol, code="cancelled"),
            self.server.metric("penstock_cancelled", model="slow"),
        )

    async def wait_for_queue(self, waiting: int, running: int) -> None:
        def is_so() -> bool:
            (found,) = self.server.status()["queues"].values()
            return bool(found == {"waiting": waiting, "running": running})

        await until_seen(is_so, f"{waiting} wait and {running} run")


async def send_unary(stub: Any) -> Leave:
    call = stub.ModelInfer(floats("slow", LONG), timeout=WAIT_S)

    async def leave() -> None:
        call.cancel()

    await asyncio.sleep(0)
    return leave


async def send_on_stream(stub: Any) -> Leave:
    over = asyncio.Event()

    async def messages() -> AsyncIterator[pb.ModelInferRequest]:
        yield floats("slow", LONG)
        await over.wait()

    call = stub.ModelStreamInfer(messages(), timeout=WAIT_S)
    await call.wait_for_connection()

    async def leave() -> None:
        call.cancel()

    return leave


async def send_by_rest(http: httpx.AsyncClient) -> Leave:
    task = asyncio.create_task(http.post("/v2/models/slow/infer", json=floats_json(LONG)))

    async def leave() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return leave


async def send_v1(http: httpx.AsyncClient) -> Leave:
    task = asyncio.create_task(http.post("/v1/infer", json={"model": "slow", "inputs": {"x": [[LONG]]}}))

    async def leave() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return leave


@pytest.fixture(params=["grpc", "grpc-stream", "rest", "v1"])
async def endpoint(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[Endpoint]:
    async with (
        grpc.aio.insecure_channel(server.grpc) as channel,
        httpx.AsyncClient(base_url=server.http_url, timeout=WAIT_S) as http,
    ):
        stub = GRPCInferenceServiceStub(channel)
        senders: dict[str, Callable[[], Awaitable[Leave]]] = {
            "grpc": lambda: send_unary(stub),
            "grpc-stream": lambda: send_on_stream(stub),
            "rest": lambda: send_by_rest(http),
            "v1": lambda: send_v1(http),
        }
        protocol = "rest" if request.param == "v1" else request.param
        yield Endpoint(server, protocol, senders[request.param])


async def test_a_disconnect_cancels_the_request_everywhere(endpoint: Endpoint) -> None:
    before = await asyncio.to_thread(endpoint.counts)
    leave_running = await endpoint.send()
    await endpoint.wait_for_queue(0, 1)
    leave_on_worker = await endpoint.send()
    await endpoint.wait_for_queue(0, 2)
    leave_in_gateway = await endpoint.send()
    await endpoint.wait_for_queue(1, 2)

    await leave_in_gateway()
    await endpoint.wait_for_queue(0, 2)
    await until_seen(
        lambda: endpoint.counts() == Counts(before.in_gateway + 1, before.on_worker), "one left the gateway's queue"
    )
    await leave_on_worker()
    await endpoint.wait_for_queue(0, 1)
    await leave_running()
    await endpoint.wait_for_queue(0, 0)
    await until_seen(
        lambda: endpoint.counts() == Counts(before.in_gateway + 3, before.on_worker + 2),
        "two were given up on the worker",
    )
    await until_seen(lambda: endpoint.server.metric("penstock_inflight_requests") == 0, "nothing is inside")
    await until_seen(lambda: endpoint.server.status()["workers"][0]["jobs"] == 0, "the worker holds nothing")


async def test_other_clients_are_served(server: ServerProcess) -> None:
    """A neighbour that leaves changes nothing for waiting requests, and its place is used."""
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer(floats("slow", 200.0 + number), timeout=WAIT_S) for number in range(9)]
        await asyncio.sleep(0)
        for call in calls[1::2]:
            call.cancel()
        answers = await asyncio.gather(*calls[::2])
        assert [answered(answer) for answer in answers] == [[200.0 + number] for number in range(0, 9, 2)]
