"""Callers' limits on a real server: two gateways that share them in Redis, over every protocol, and without Redis."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from websockets.asyncio.client import connect

from benchmarks.server import ServerProcess
from benchmarks.valkey import Valkey
from benchmarks.waiting import until_seen
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import ROOT, floats, floats_json, log_lines, write_identity

WAIT_S = 90.0
# So slow that no tokens return while the tests run.
REQUESTS = 40
SPREAD = 24  # requests on separate connections, so many that both gateways get at least one
LIMITS = {"requests_per_s": 0.001, "burst_s": REQUESTS * 1000.0, "tokens_per_s": 1000, "concurrency": 100}


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture(scope="module")
def server(valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("limits")
    write_identity(folder / "models", "identity", "FP32")
    (folder / "models" / "minilm").symlink_to(ROOT / "models/minilm")
    settings = {"access": {"limits_url": valkey.url, "anonymous_limits": LIMITS}}
    with ServerProcess(folder / "models", folder, "--gateways", "2", settings=settings) as running:
        yield running


class Caller:
    """Sends each request over the next protocol."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    async def rest(self) -> tuple[bool, dict[str, Any]]:
        """Send over a new connection each time, which either gateway may get."""
        body = floats_json(1.0)
        async with httpx.AsyncClient(base_url=self._server.http_url, timeout=WAIT_S) as http:
            answer = await http.post("/v2/models/identity/infer", json=body)
        assert answer.status_code in (200, 429), answer.text
        return answer.status_code == 200, dict(answer.headers)

    async def openai(self) -> tuple[bool, dict[str, Any]]:
        async with httpx.AsyncClient(base_url=self._server.http_url, timeout=WAIT_S) as http:
            answer = await http.post("/v1/embeddings", json={"model": "minilm", "input": "a text"})
        assert answer.status_code in (200, 429), answer.text
        return answer.status_code == 200, dict(answer.headers)

    async def grpc(self) -> tuple[bool, dict[str, Any]]:
        async with grpc.aio.insecure_channel(self._server.grpc) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            call = stub.ModelInfer(floats("identity", 1.0), timeout=WAIT_S)
            try:
                await call
            except grpc.aio.AioRpcError as error:
                return error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED, dict(error.trailing_metadata() or ())
            return True, dict(await call.trailing_metadata())

    async def stream(self) -> tuple[bool, dict[str, Any]]:
        async with grpc.aio.insecure_channel(self._server.grpc) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            (answer,) = [each async for each in stub.ModelStreamInfer(iter([floats("identity", 1.0)]), timeout=WAIT_S)]
        parameters = answer.infer_response.parameters
        return not answer.error_message, {
            "penstock-code": parameters["penstock-code"].string_param,
            "penstock-limit": parameters["limit"].string_param,
        }

    async def websocket(self) -> tuple[bool, dict[str, Any]]:
        address = self._server.http_url.replace("http", "ws", 1) + "/v2/models/identity/stream"
        async with connect(address, proxy=None) as socket:
            await socket.send(json.dumps(floats_json(1.0)))
            answer = json.loads(await socket.recv())
        return "error" not in answer, {"penstock-code": answer.get("code"), "penstock-limit": answer.get("limit")}


async def test_all_gateways_and_protocols_share_a_callers_limits_and_survive_the_loss_of_redis(
    server: ServerProcess, valkey: Valkey
) -> None:
    caller = Caller(server)
    ways = (caller.rest, caller.openai, caller.grpc, caller.stream, caller.websocket)
    for passed, way in enumerate(ways * (REQUESTS // len(ways)), 1):
        is_passed, told = await way()
        assert is_passed
        if "ratelimit" in told:
            assert told["ratelimit"].startswith(f'"requests";r={REQUESTS - passed};')
            assert told["x-ratelimit-remaining"] == str(REQUESTS - passed)
            assert '"requests";q=40;w=40000' in told["ratelimit-policy"]
        if way == caller.openai:
            assert told["x-ratelimit-remaining-requests"] == str(REQUESTS - passed)
            assert int(told["x-ratelimit-remaining-tokens"]) > 0
    for way in ways:
        is_passed, told = await way()
        assert not is_passed, way
        assert (told["penstock-code"], told["penstock-limit"]) == ("rate_limited", "requests")
        if way not in (caller.stream, caller.websocket):
            assert 0 < int(told["retry-after"]) <= 1000
            assert told["ratelimit"].startswith('"requests";r=0;')
    for _ in range(SPREAD):  # so that both gateways know of the refusal
        assert not (await caller.rest())[0]
    refused = len(ways) + SPREAD
    await until_seen(lambda: server.metric("penstock_rate_limited", limit="requests") == refused, "they are counted")
    assert server.status()["limits"] == {"store": "redis", "away": False, "share": 1.0}
    valkey.kill()
    for _ in range(SPREAD):
        assert not (await caller.rest())[0]  # a certain refusal needs no Redis
    await _until_away(server, 2)
    assert server.status()["limits"] == {"store": "redis", "away": True, "share": 0.5}
    assert not (await caller.grpc())[0]  # each continues from Redis' last state
    valkey.start()
    await _until_away(server, 0)
    assert not (await caller.rest())[0]
    told_of = [line["event"] for line in log_lines(server.log) if line["event"].startswith("limits_")]
    assert sorted(told_of) == ["limits_not_shared"] * 2 + ["limits_shared_again"] * 2
    assert not server.tracebacks()


async def _until_away(server: ServerProcess, gateways: int) -> None:
    await until_seen(lambda: server.metric("penstock_limits_away") == gateways, "every gateway has seen it", WAIT_S)
