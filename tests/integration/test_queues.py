"""Priorities and queue timeouts of a real server, for requests that wait on the worker and in the gateway."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually, until_seen
from tests.servers import floats_json, write_slow

WAIT_S = 90.0
LONG = 10_000.0  # rounds of the slow model: more than a second on a fast machine
SHORT = 100.0
# One instance that takes one row: one request runs, one waits on the worker, the others in the gateway.
SETTINGS = """
batching: {max_rows: 1}
instances: {count: 1}
timeouts: {request_s: 600}
priorities:
  levels: 3
  default: 2
  queue: {allow_override: true, max_queue: 3}
  by_level:
    3: {on_timeout: delay, timeout_ms: 1}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("queues")
    write_slow(folder / "models", "slow", SETTINGS)
    with ServerProcess(folder / "models", folder) as running:
        yield running


class Line:
    """Requests that are sent one after another while the model is busy, and the order of their answers."""

    def __init__(self, server: ServerProcess, http: httpx.AsyncClient) -> None:
        self.server = server
        self.http = http
        self.order: list[str] = []
        self.sent = 0
        self.tasks: dict[str, asyncio.Task[httpx.Response]] = {}

    async def send(self, name: str, rounds: float = SHORT, **parameters: Any) -> None:
        async def ask() -> httpx.Response:
            body = {**floats_json(rounds), "parameters": parameters}
            response = await self.http.post("/v2/models/slow/infer", json=body)
            self.order.append(name)
            return response

        before = self._inside()
        self.tasks[name] = asyncio.create_task(ask())
        await until_seen(lambda: self._inside() > before or self.tasks[name].done(), f"{name} waits")

    def _inside(self) -> int:
        return int(self.server.status()["inflight_requests"])

    async def answers(self) -> dict[str, httpx.Response]:
        await asyncio.wait_for(asyncio.gather(*self.tasks.values()), WAIT_S)
        return {name: task.result() for name, task in self.tasks.items()}


@pytest.fixture
async def line(server: ServerProcess) -> Any:
    async with httpx.AsyncClient(base_url=server.http_url, timeout=WAIT_S) as http:
        made = Line(server, http)
        await made.send("running", LONG)
        yield made
        await made.answers()


async def test_a_high_priority_overtakes_requests_in_the_gateway_and_on_the_worker(line: Line) -> None:
    for name in ("on the worker", "low", "lower"):
        await line.send(name, priority=2)
    await line.send("high", priority=1)
    answers = await line.answers()
    assert {answer.status_code for answer in answers.values()} == {200}
    assert line.order == ["running", "high", "on the worker", "low", "lower"]
    assert line.server.metric("penstock_retries_total", reason="recalled") == 1


async def test_a_queue_timeout_rejects_on_the_worker_and_in_the_gateway(line: Line) -> None:
    await line.send("on the worker", timeout=300_000)
    await line.send("in the gateway", timeout=50_000)
    await line.send("patient")
    answers = await line.answers()
    for name in ("on the worker", "in the gateway"):
        assert (answers[name].status_code, answers[name].headers["penstock-code"]) == (503, "queue_timeout")
    assert answers["patient"].status_code == 200
    assert line.order[-2:] == ["running", "patient"]  # no caller waited for the model
    eventually(
        lambda: line.server.metric("penstock_failures_total", model="slow", code="queue_timeout") >= 1,
        "the worker's own timeout is counted",
    )


async def test_requests_delayed_by_their_priority_level_are_served_last(line: Line) -> None:
    await line.send("on the worker", priority=2)
    await line.send("delayed", priority=3)
    await line.send("after", priority=2)
    answers = await line.answers()
    assert {answer.status_code for answer in answers.values()} == {200}
    assert line.order == ["running", "on the worker", "after", "delayed"]


async def test_each_priority_level_has_its_own_limit(line: Line) -> None:
    await line.send("on the worker")
    for n in range(4):
        await line.send(f"level 2, {n}")
    await line.send("level 1", priority=1)
    answers = await line.answers()
    refused = answers["level 2, 3"]
    assert (refused.status_code, refused.headers["penstock-code"]) == (429, "queue_full")
    assert [answer.status_code for answer in answers.values()].count(429) == 1
