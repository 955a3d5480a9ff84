"""Quotas on a real server with two gateways and Redis: every protocol, sessions, blocks, and refusals."""

from collections.abc import Iterator

import httpx
import pytest

from benchmarks.server import ServerProcess
from benchmarks.valkey import Valkey
from benchmarks.waiting import until_seen
from tests.integration.test_rate_limits import Caller
from tests.servers import floats_json, write_identity

PER_BLOCK, PER_SESSION = 20, 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("quotas")
    for name in ("identity", "other"):
        write_identity(folder / "models", name, "FP32")
    quotas = {"requests_per_block_id": PER_BLOCK, "requests_per_session_id": PER_SESSION, "reset_s": 31_536_000}
    with Valkey(folder / "valkey") as valkey:
        settings = {"access": {"limits_url": valkey.url}, "quotas": quotas}
        with ServerProcess(folder / "models", folder, "--gateways", "2", settings=settings) as running:
            yield running


async def test_a_blocks_total_holds_for_all_gateways_and_protocols(server: ServerProcess) -> None:
    caller = Caller(server)
    ways = (caller.rest, caller.grpc, caller.stream, caller.websocket)
    for way in ways * (PER_BLOCK // len(ways)):
        assert (await way())[0], way
    for way in ways:
        is_passed, told = await way()
        assert not is_passed, way
        assert (told["penstock-code"], told["penstock-limit"]) == ("rate_limited", "requests_per_block_id")
    assert int(told.get("retry-after", "1")) > 0
    await until_seen(
        lambda: server.metric("penstock_rate_limited", limit="requests_per_block_id") == len(ways), "they are counted"
    )


async def test_a_sessions_total_leaves_other_sessions_alone(server: ServerProcess) -> None:
    found: dict[str, list[int]] = {}
    for session in ("s1", "s2"):
        for _ in range(PER_SESSION + 2):
            async with httpx.AsyncClient(base_url=server.http_url, timeout=60.0) as http:
                body = {**floats_json(1.0), "parameters": {"session_id": session}}
                answer = await http.post("/v2/models/other/infer", json=body)
            found.setdefault(session, []).append(answer.status_code)
    assert found == {session: [200] * PER_SESSION + [429] * 2 for session in ("s1", "s2")}
    assert answer.headers["penstock-limit"] == "requests_per_session_id"
    assert answer.headers["x-ratelimit-remaining"] == "0"
    assert 0 < int(answer.headers["retry-after"]) <= 31_536_000
    assert "the quota of this session is used up" in answer.text
    assert not server.tracebacks()
