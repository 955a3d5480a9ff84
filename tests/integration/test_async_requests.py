"""Asynchronous requests over two gateways that share a port: state, result, cancellation, a gateway's death."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from benchmarks.server import ServerProcess
from benchmarks.valkey import Valkey
from benchmarks.waiting import eventually
from penstock.pb.blocks import inference_pb2 as pb
from penstock.pb.blocks.inference_pb2_grpc import BlockInferenceServiceStub
from tests.servers import floats_json, write_identity, write_slow

WAIT_S = 60.0
ASYNC = {"prefer": "wait=5, respond-async"}
LONG = floats_json(20_000.0)  # ten seconds of work
ENDED = ("succeeded", "failed", "cancelled", "lost")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("asynchronous")
    write_identity(folder / "models", "same", "FP32")
    write_slow(folder / "models", "slow", "instances: {count: 2}\ntimeouts: {request_s: 120}\n")
    with ServerProcess(folder / "models", folder / "server", "--gateways", "2") as running:
        yield running


def test_gateways_share_limits_and_answers_in_redis(tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "same", "FP32")
    write_slow(tmp_path / "models", "slow", "timeouts: {request_s: 120}\n")
    with Valkey(tmp_path / "valkey") as valkey:
        settings = {"async_requests": {"url": valkey.url, "max_requests": 20}}
        flags = ("--gateways", "2")
        with ServerProcess(tmp_path / "models", tmp_path / "server", *flags, settings=settings) as server:
            send = partial(call, server, "POST", "/v2/models/same/infer", json=floats_json(1.0), headers=ASYNC)
            with ThreadPoolExecutor(16) as pool:
                answers = list(pool.map(lambda _: send(), range(60)))
            assert Counter(each.status_code for each in answers) == {202: 20, 429: 40}
            done = [each.headers["location"] for each in answers if each.status_code == 202]
            for place in done:
                wait(server, place, "succeeded")
            assert call(server, "DELETE", done.pop()).status_code == 200
            lost = start(server, "/v2/models/slow/infer", LONG)
            assert send().status_code == 429
            for pid in server.children("gateway").values():
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: is_ready(server), "the server is ready", WAIT_S)
            assert [call(server, "GET", f"{place}/result").status_code for place in done] == [200] * 19
            assert wait(server, lost, *ENDED)["state"] == "lost"
            assert call(server, "DELETE", lost).status_code == 200
            assert send().status_code == 202  # there is room again


def is_ready(server: ServerProcess) -> bool:
    try:
        return call(server, "GET", "/readyz").is_success
    except httpx.HTTPError:
        return False


def call(server: ServerProcess, method: str, path: str, **given: Any) -> httpx.Response:
    """Send a request over a connection of its own, which reaches any of the gateways."""
    return httpx.request(method, f"{server.http_url}{path}", timeout=WAIT_S, **given)


def start(server: ServerProcess, path: str, body: dict[str, Any]) -> str:
    answer = call(server, "POST", path, json=body, headers=ASYNC)
    assert (answer.status_code, answer.json()["state"]) == (202, "running"), answer.text
    assert answer.headers["preference-applied"] == "respond-async"
    place: str = answer.headers["location"]
    assert place == f"/v1/requests/{answer.json()['id']}"
    return place


def wait(server: ServerProcess, place: str, *states: str) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found: dict[str, Any] = call(server, "GET", place).json()
        if found["state"] in states:
            return found
        time.sleep(0.05)
    raise TimeoutError(found)


@pytest.mark.parametrize("path", ["/v2/models/same/infer", "/v1/infer"])
def test_the_answer_is_that_of_the_request_itself(server: ServerProcess, path: str) -> None:
    body = {"model": "same"} | floats_json(1.0, 2.0)
    now = call(server, "POST", path, json=body)
    place = start(server, path, body)
    found = wait(server, place, "succeeded")
    assert (found["status"], found["path"], found["result"]) == (200, path, f"{place}/result")
    for _ in range(8):  # some of the connections reach the other gateway
        later = call(server, "GET", f"{place}/result")
        assert (later.status_code, later.headers["content-type"]) == (200, now.headers["content-type"])
        assert later.json()["outputs"] == now.json()["outputs"]
    assert call(server, "DELETE", place).status_code == 200
    assert call(server, "GET", place).status_code == 404


def test_an_error_is_the_result(server: ServerProcess) -> None:
    place = start(server, "/v2/models/absent/infer", floats_json(1.0))
    assert wait(server, place, *ENDED)["state"] == "failed"
    result = call(server, "GET", f"{place}/result")
    assert (result.status_code, "unknown model" in result.text) == (404, True)


def test_a_running_request_is_cancelled_on_any_gateway(server: ServerProcess) -> None:
    places = [start(server, "/v2/models/slow/infer", LONG) for _ in range(4)]
    assert call(server, "GET", f"{places[0]}/result").status_code == 202
    for place in places:
        assert call(server, "DELETE", place).status_code == 202
    for place in places:
        assert wait(server, place, *ENDED)["state"] == "cancelled"
        assert call(server, "GET", f"{place}/result").status_code == 499
    assert server.metric("penstock_requests", code="cancelled") >= 4


def test_other_routes_ignore_the_preference(server: ServerProcess) -> None:
    assert call(server, "GET", "/v1/models", headers=ASYNC).status_code == 200
    assert call(server, "POST", "/v2/repository/index", json={}, headers=ASYNC).status_code == 200
    assert call(server, "POST", "/v2/models/same/infer", json=floats_json(1.0), headers={"prefer": "x"}).is_success


@pytest.mark.parametrize("way", ["data", "field", "grpc"])
def test_packets_may_be_asynchronous(server: ServerProcess, way: str) -> None:
    values = {"inputs": {"x": [[1.0]]}}
    if way == "grpc":
        with grpc.insecure_channel(server.grpc) as channel:
            packet = pb.BlockInferencePacket(block_id="same", session_id="s", seq_no=2**64 - 1)
            packet.data = '{"mode": "async", "inputs": {"x": [[1.0]]}}'
            answer = BlockInferenceServiceStub(channel).infer(packet, timeout=WAIT_S)
        place = httpx.Response(200, text=answer.data).json()["location"]
    else:
        data = values | ({"mode": "async"} if way == "data" else {})
        body: dict[str, Any] = {"block_id": "same", "session_id": "s", "seq_no": 2**64 - 1, "data": data}
        answer = call(server, "POST", "/v1/infer", json=body | ({} if way == "data" else {"mode": "async"}))
        assert answer.status_code == 202, answer.text
        place = answer.headers["location"]
    wait(server, place, "succeeded")
    found = call(server, "GET", f"{place}/result").json()
    assert (found["data"], found["seq_no"]) == ({"outputs": {"y": [[1.0]]}}, 2**64 - 1)


def test_a_gateways_death_keeps_results_and_reports_running_requests_as_lost(server: ServerProcess) -> None:
    done = start(server, "/v2/models/same/infer", floats_json(1.0))
    wait(server, done, "succeeded")
    lost = start(server, "/v2/models/slow/infer", LONG)
    for pid in server.children("gateway").values():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: is_ready(server), "the server is ready", WAIT_S)
    assert wait(server, lost, *ENDED)["state"] == "lost"
    result = call(server, "GET", f"{lost}/result")
    assert (result.status_code, result.headers["penstock-code"]) == (503, "gateway_lost")
    assert call(server, "GET", f"{done}/result").status_code == 200
