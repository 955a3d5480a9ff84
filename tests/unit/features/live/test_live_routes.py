"""The live view's page and stream, over snapshots that the test provides."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry

from penstock.core.config import Config, Limits
from penstock.endpoints.guard import create_open_guard
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.features.live import live_routes as live_rest
from penstock.features.live import streams
from penstock.features.live.streams import LiveStreams
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.http_app import build_http_app
from penstock.telemetry.snapshot import ProcessFigures, Series, Snapshot

OK = Series("penstock_requests_total", frozenset({"code": "ok", "model": "echo", "version": "1"}.items()))
FAST = "/v1/live?interval=0.2"
WITHIN_S = 20.0


class Served:
    """A gateway's live view; every snapshot of its metrics contains one more request."""

    def __init__(self, catalogue: Catalogue, serving: Any) -> None:
        self.reads = 0
        self.published = 0
        self.error: Exception | None = None
        self.streams = LiveStreams(self.read, self.publish, catalogue.describe_server)
        http_guard = HttpGuard(Config(allowed_hosts=("penstock",)), create_open_guard())
        self.app = build_http_app(serving, catalogue, Limits(), CollectorRegistry, http_guard, self.streams)

    def read(self) -> Snapshot:
        if self.error is not None:
            raise self.error
        self.reads += 1
        return {"gateway-0": ProcessFigures({OK: float(self.reads)})}

    def publish(self) -> None:
        self.published += 1


class Stream:
    """One GET, as a server passes it to the application."""

    def __init__(self, app: Any, target: str) -> None:
        path, _, query = target.partition("?")
        self.status = 0
        self.headers: dict[str, str] = {}
        self.sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._left = asyncio.Event()
        self._has_asked = False
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "headers": [], "http_version": "1.1", "scheme": "http", "server": ("penstock", 80), "root_path": "",
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._has_asked:
            self._has_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.may_send.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.sent.put_nowait(message["body"])
            if not message.get("more_body"):
                self.sent.put_nowait(None)

    async def chunk(self) -> bytes | None:
        return await asyncio.wait_for(self.sent.get(), WITHIN_S)

    async def event(self) -> dict[str, Any]:
        while (found := await self.chunk()) is not None:
            if found.startswith(b"data: "):
                assert found.endswith(b"\n\n")
                return dict(json.loads(found.removeprefix(b"data: ")))
        raise AssertionError("the stream ended")

    async def ended(self) -> None:
        await asyncio.wait_for(asyncio.shield(self.task), WITHIN_S)

    def leave(self) -> None:
        self._left.set()


@pytest.fixture
def catalogue(served) -> Catalogue:
    class Workers:
        worker_id, pid, jobs, memory_bytes, blocks = "worker-0", 5, 2, 99, {"blk-echo-1": None}
        dormant, zone, devices = frozenset[str](), "", ()

    class Dispatcher:
        def list_workers(self) -> list[Any]:
            return [Workers]

        def count_jobs_by_block(self) -> dict[str, tuple[int, int]]:
            return {}

        async def collect_statistics(self) -> list[Any]:
            return []

    return Catalogue(served.admission, served.resolver, cast(Any, Dispatcher()), served.control)


@pytest.fixture
async def watched(catalogue, served) -> AsyncIterator[Served]:
    found = Served(catalogue, served.serving)
    yield found
    found.streams.close()
    await asyncio.sleep(0)


@asynccontextmanager
async def watching(watched: Served, target: str = FAST) -> AsyncIterator[Stream]:
    stream = Stream(watched.app, target)
    try:
        yield stream
    finally:
        stream.leave()
        stream.may_send.set()
        await stream.ended()


@pytest.fixture
async def browser(watched) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=watched.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as opened:
        yield opened


async def test_events_contain_work_blocks_and_workers(watched):
    async with watching(watched) as stream:
        assert await stream.chunk() == b"retry: 1000\n\n"
        assert stream.status == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        event = await stream.event()
        assert event["work"]["requests_per_s"] == pytest.approx(1 / event["seconds"], rel=0.01)
        assert event["requests_by_model"].keys() == {"echo"}
        assert event["ready"] is True
        states = {block["block_id"]: block["state"] for block in event["blocks"]}
        assert states["blk-echo-1"] == "ready"
        assert states["blk-slow-1"] == "failed"
        assert event["blocks"][0]["max_rows"] == 32
        assert event["workers"][0]["id"] == "worker-0"
        assert event["workers"][0]["blocks"] == ["blk-echo-1"]
        assert (await stream.event())["at"] > event["at"]
    assert watched.published >= watched.reads > 1


@pytest.mark.parametrize("interval", ["0.1", "61", "-1", "nan", "inf", "soon", ""])
async def test_an_interval_out_of_bounds_is_refused(browser, watched, interval):
    answer = await browser.get(f"/v1/live?interval={interval}")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"
    assert "0.2 to 60" in answer.json()["error"]["message"]
    assert len(watched.streams) == 0


async def test_streams_of_one_interval_share_a_sampler_and_no_stream_costs_nothing(watched):
    async with watching(watched) as first:
        await first.event()
        async with watching(watched) as second, watching(watched, "/v1/live?interval=60") as other:
            await second.event()
            assert await other.chunk() == live_rest.RETRY
            assert (len(watched.streams), len(watched.streams._samplers)) == (3, 2)
        assert (len(watched.streams), len(watched.streams._samplers)) == (1, 1)
    assert (len(watched.streams), len(watched.streams._samplers)) == (0, 0)
    reads = watched.reads
    await asyncio.sleep(0.5)
    assert watched.reads == reads


async def test_a_new_stream_gets_the_newest_event_at_once(watched):
    async with watching(watched, "/v1/live?interval=0.2") as first:
        await first.event()
        watched.error = RuntimeError("no look must be needed")
        async with watching(watched) as second:
            await second.event()


async def test_too_many_streams_are_refused_until_one_leaves(watched, browser, monkeypatch):
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    async with watching(watched) as first:
        async with watching(watched) as second:
            await first.event()
            await second.event()
            answer = await browser.get("/v1/live")
            assert answer.status_code == 429
            assert answer.headers["penstock-code"] == "refused"
            assert "2 live streams" in answer.json()["error"]["message"]
        async with watching(watched) as third:
            await third.event()


async def test_closing_ends_streams_and_refuses_new_ones(watched, browser):
    stream = Stream(watched.app, "/v1/live?interval=60")
    assert await stream.chunk() == live_rest.RETRY
    watched.streams.close()
    assert await stream.chunk() == b""
    assert await stream.chunk() is None
    await stream.ended()
    answer = await browser.get("/v1/live")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")


async def test_a_slow_reader_skips_events_and_none_accumulate(watched):
    async with watching(watched) as slow, watching(watched) as quick:
        await slow.event()
        slow.may_send.clear()
        for _ in range(5):
            last = await quick.event()
        slow.may_send.set()
        stuck, newest = await slow.event(), await slow.event()
        assert stuck["at"] < last["at"] <= newest["at"]
        assert slow.sent.empty()


async def test_a_client_that_reads_nothing_is_disconnected(watched, monkeypatch):
    monkeypatch.setattr(live_rest, "SEND_S", 0.1)
    stream = Stream(watched.app, FAST)
    await stream.event()
    stream.may_send.clear()
    await stream.ended()
    assert len(watched.streams) == 0


async def test_a_failed_snapshot_ends_its_streams_and_the_next_stream_starts_again(watched):
    watched.error = OSError("no such folder")
    stream = Stream(watched.app, FAST)
    await stream.ended()
    assert (len(watched.streams), len(watched.streams._samplers)) == (0, 0)
    watched.error = None
    async with watching(watched) as again:
        await again.event()


async def test_browsers_get_the_page_and_programs_get_json(browser):
    page = await browser.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert (await browser.get("/", headers={"accept": "*/*"})).text == page.text
    root = (await browser.get("/", headers={"accept": "application/json"})).json()
    assert root["name"] == "penstock"
    for link in root["links"].values():
        assert link == "/v1/live" or (await browser.get(link)).status_code == 200, link


async def test_the_page_loads_nothing_from_elsewhere(browser):
    page = await browser.get("/")
    parts = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text)
    assert len(parts) == 2
    for part in (*parts, "dashboard/charts.js", "dashboard/format.js", "dashboard/tables.js"):
        answer = await browser.get(f"/{part}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].split(";")[0] in ("text/css", "text/javascript")
        found = set(re.findall(r"https?://[^\s\"')]+", answer.text))
        assert found <= {"http://www.w3.org/2000/svg"}, part  # an XML name that nothing loads
    assert "https://" not in page.text
    assert (await browser.get("/dashboard/../gateway.py")).status_code == 404


async def test_the_openapi_document_describes_the_stream_and_its_events(browser):
    document = (await browser.get("/openapi.json")).json()
    operation = document["paths"]["/v1/live"]["get"]
    assert operation["responses"]["200"]["content"].keys() == {"text/event-stream"}
    assert [parameter["name"] for parameter in operation["parameters"]] == ["interval"]
    assert document["paths"].keys() >= {"/", "/v1/live"}
    schemas = document["components"]["schemas"]
    assert schemas["Live"]["properties"].keys() >= {"live"}  # the health answer keeps its name
    names = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert names <= set(schemas)
