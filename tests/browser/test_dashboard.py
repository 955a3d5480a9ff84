"""The live page in a real browser, for a real server under load."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import BrowserContext, HttpCredentials, Page, ViewportSize, expect, sync_playwright

from benchmarks.server import ServerProcess
from tests.nvml import HAS_COMPILER, make_stub_environment
from tests.servers import floats_json, write_identity, write_slow

WITHIN_MS = 60_000
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Functions instead of expressions: the page's policy forbids evaluating text.
BUSY = "() => Number(document.querySelector('#requests').textContent) > 5"
DRAWN = """() => [...document.querySelectorAll('#chart-requests path')]
    .some(path => path.getAttribute('d').split('L').length > 3)"""
ASK = """path => new Promise((answered, failed) => {
    const socket = new WebSocket(`ws://${location.host}${path}`);
    const inputs = [{name: 'x', datatype: 'FP32', shape: [1, 1], data: [1]}];
    socket.onopen = () => socket.send(JSON.stringify({inputs}));
    socket.onmessage = message => answered(message.data);
    socket.onerror = () => failed(new Error('the WebSocket failed'));
})"""
FIRST = {"count": 9, "mean_ms": 90.0, "p50_ms": 80.0, "p95_ms": 200.0, "p99_ms": 240.0}
BETWEEN = {"count": 99, "mean_ms": 19.0, "p50_ms": 18.0, "p95_ms": 23.0, "p99_ms": 25.0}
NONE = {"count": 0, "mean_ms": None, "p50_ms": None, "p95_ms": None, "p99_ms": None}
GENERATING = {
    "tokens_per_s": 412.0,
    "prompt_tokens_per_s": 220.0,
    "request_tokens_per_s": 51.5,
    "answers": {"stop": 2.0},
    "first_token": NONE,  # no answer is streamed: the engine's own is shown
    "between_tokens": BETWEEN,
    "engine_first_token": FIRST,
    "engine_between_tokens": NONE,
    "prefix_hits": 0.25,
    "running": 8,
    "waiting": 2,
    "cache_blocks_used": 16,
    "cache_blocks": 64,
    "preemptions": {"count": 1, "total": 3},
}
PHONE = ViewportSize(width=390, height=844)


@contextmanager
def browser_of(tmp_path: Path, credentials: HttpCredentials | None = None) -> Iterator[BrowserContext]:
    chromium = shutil.which("chromium")
    assert chromium is not None, "there is no chromium: run scripts/packages"
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path / "profile"),
            executable_path=chromium,
            headless=True,
            args=list(FLAGS),
            viewport={"width": 1280, "height": 900},
            http_credentials=credentials,
        )
        context.set_default_timeout(WITHIN_MS)
        expect.set_options(timeout=WITHIN_MS)
        yield context
        context.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[BrowserContext]:
    with browser_of(tmp_path) as context:
        yield context


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    models = tmp_path / "models"
    write_identity(models, "identity", "FP32")
    write_slow(models, "slow", "batching: {max_rows: 1, max_queue: 1}\ninstances: {count: 1}\n")
    with ServerProcess(models, tmp_path / "server", environment=make_stub_environment(tmp_path)) as running:
        yield running


@pytest.fixture
def load(server: ServerProcess) -> Iterator[None]:
    """Send requests to every model, and continue over the server's restart."""
    stop = threading.Event()

    def send(model: str, number: float) -> None:
        with httpx.Client(base_url=server.http_url, timeout=30) as client:
            while not stop.wait(0.02):
                try:
                    client.post(f"/v2/models/{model}/infer", json=floats_json(number))
                except httpx.TransportError:
                    stop.wait(0.2)

    asked = [("identity", 1.0), ("slow", 20.0), ("slow", 20.0), ("slow", 20.0), ("slow", 20.0), ("nobody", 1.0)]
    threads = [threading.Thread(target=send, args=each) for each in asked]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()


class Watch:
    """Requests that the page sends, and its console errors."""

    def __init__(self, page: Page) -> None:
        self.addresses: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.addresses.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self._said(message.type, message.text))

    def _said(self, kind: str, text: str) -> None:
        # While the server is away, a browser logs each attempt to reach it.
        if kind in ("error", "warning") and "net::ERR_" not in text:
            self.complaints.append(text)


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("load")
def test_the_page_follows_a_server_through_its_restart(
    browser: BrowserContext, server: ServerProcess, tmp_path: Path
) -> None:
    page = browser.new_page()
    watch = Watch(page)
    page.goto(server.http_url)
    expect(page.locator("#state")).to_have_text("Live")
    page.wait_for_function(BUSY)
    first = page.locator("#requests").inner_text()
    expect(page.locator("#requests")).not_to_have_text(first)
    check_tables(page)
    if HAS_COMPILER:
        expect(page.locator("#devices tr").first).to_contain_text("700 B of 1000 B")
    check_charts(page)
    take_screenshots(page, tmp_path)

    server.terminate()
    expect(page.locator("#state")).to_have_text("Disconnected")
    expect(page.locator("#notice")).to_contain_text("does not answer")
    page.screenshot(path=tmp_path / "disconnected.png", full_page=True)

    with ServerProcess(tmp_path / "models", tmp_path / "server", "--http-port", str(server.http_port)):
        expect(page.locator("#state")).to_have_text("Live")
        expect(page.locator("#notice")).to_be_hidden()
        page.wait_for_function(BUSY)
        expect(page.locator("#devices-card")).to_be_hidden()  # there is no driver

    assert watch.complaints == []
    elsewhere = [address for address in watch.addresses if not address.startswith((f"{server.http_url}/", "data:"))]
    assert elsewhere == []


@pytest.mark.timeout(200)
def test_the_browser_sends_the_key_as_a_password(tmp_path: Path) -> None:
    """For the page, its live stream, the documentation and WebSockets alike."""
    write_identity(tmp_path / "models", "identity", "FP32")
    with ServerProcess(tmp_path / "models", tmp_path / "server") as server:
        key = made_key(tmp_path / "server" / "data")
        with browser_of(tmp_path, {"username": "anybody", "password": "psk_wrong"}) as browser:
            answer = browser.new_page().goto(server.http_url)
            assert answer is not None
            assert answer.status == 401
        with browser_of(tmp_path, {"username": "anybody", "password": key}) as browser:
            page = browser.new_page()
            page.goto(server.http_url)
            expect(page.locator("#state")).to_have_text("Live")
            assert page.evaluate(ASK, "/v2/models/identity/stream").startswith('{"model_name"')
            answer = page.goto(f"{server.http_url}/docs")
            assert answer is not None
            assert answer.status == 200


def test_the_api_reference_shows_every_operation_and_sends_requests(browser: BrowserContext, tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "identity", "FP32")
    with ServerProcess(tmp_path / "models", tmp_path / "server") as server:
        page = browser.new_page()
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(f"{server.http_url}/docs")
        document = httpx.get(f"{server.http_url}/openapi.json").json()
        methods = [method for path in document["paths"].values() for method in path]
        expect(page.locator(".opblock")).to_have_count(len(methods))
        operation = page.locator(".opblock").filter(has=page.locator('[data-path="/v2/models/{model}/ready"]'))
        operation.locator(".opblock-summary-control").click()
        operation.get_by_role("button", name="Try it out").click()
        operation.get_by_placeholder("model").fill("identity")
        operation.get_by_role("button", name="Execute").click()
        expect(operation.locator(".live-responses-table tbody .response-col_status")).to_contain_text("200")
        assert problems == []


def made_key(data_dir: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "penstock",
        "key",
        "create",
        "browser",
        "--scope",
        "metrics",
        "--scope",
        "inference",
    ]
    environment = {**os.environ, "PENSTOCK_DATA_DIR": str(data_dir)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def check_tables(page: Page) -> None:
    row = page.locator("#blocks tr", has_text="identity")
    expect(row).to_contain_text("ready")
    expect(row.locator("td").nth(2)).not_to_have_text("0")
    expect(page.locator("#workers tr", has_text="worker-0")).to_contain_text("ready")
    expect(page.locator("#workers tr", has_text="worker-0")).to_contain_text("identity")
    expect(page.locator("#phases tr", has_text="compute").locator("td").nth(1)).to_have_text(re.compile(r"\d"))
    expect(page.locator("#closed [data-reason=empty]")).to_contain_text("%")


def check_charts(page: Page) -> None:
    page.wait_for_function(DRAWN)
    expect(page.locator("#chart-requests .legend")).to_contain_text("identity")
    page.get_by_text("by result").click()
    expect(page.locator("#chart-requests .legend")).to_contain_text("ok")
    expect(page.locator("#chart-requests .legend")).to_contain_text("unknown_model")
    box = page.locator("#chart-latency svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 40)
    expect(page.locator("#chart-latency .tip")).to_contain_text("p99")
    page.mouse.move(0, 0)
    expect(page.locator("#chart-latency .tip")).to_be_hidden()


def take_screenshots(page: Page, folder: Path) -> None:
    """Take screenshots; on a phone, nothing is wider than the page."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=folder / f"{scheme}.png", full_page=True)
    before = page.viewport_size
    assert before is not None
    page.set_viewport_size(PHONE)
    page.screenshot(path=folder / "phone.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.set_viewport_size(before)


def check_generated_text(page: Page) -> None:
    cells = page.locator("#generators td").all_inner_texts()
    assert cells[1:8] == ["412", "51.5", "220", "80.0 ms", "240 ms", "18.0 ms", "25.0 ms"]
    assert cells[8:] == ["8", "2", "16 of 64", "25 %", "3"]
    expect(page.locator("#chart-tokens .legend")).to_contain_text("generated412")
    expect(page.locator("#chart-first-token .legend")).to_contain_text("p99240 ms")


def test_names_are_shown_as_text_and_a_refused_stream_is_retried(
    browser: BrowserContext, server: ServerProcess, tmp_path: Path
) -> None:
    with httpx.stream("GET", f"{server.http_url}/v1/live?interval=0.2", timeout=30) as answer:
        event = json.loads(
            next(line for line in answer.iter_lines() if line.startswith("data: ")).removeprefix("data: ")
        )
    hostile = "<img src=x onerror=alert(1)>"
    event["generating"] = GENERATING
    event["blocks"][0] |= {"model": hostile, "reason": hostile, "state": hostile, "generating": GENERATING}
    event["workers"][0]["id"] = hostile
    event["requests_by_model"] = {hostile: 5.0}
    event["work"]["by_code"] = {hostile: 5.0}
    event["troubles"]["refusals"] = {hostile: {"count": 1, "total": 1}}
    tries: list[str] = []
    page = browser.new_page()
    watch = Watch(page)

    def answer_stream(route):
        tries.append(route.request.url)
        if len(tries) == 1:
            route.fulfill(status=429, json={"error": {"message": "too many", "code": "refused"}})
        else:
            route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(event)}\n\n")

    page.route("**/v1/live", answer_stream)
    page.goto(server.http_url)
    for place in ("#blocks", "#workers", "#chart-requests .legend", "#troubles", "#generators"):
        expect(page.locator(place)).to_contain_text(hostile)
    check_generated_text(page)
    take_screenshots(page, tmp_path)
    assert page.locator("img").count() == 0
    assert len(tries) >= 2
    assert [said for said in watch.complaints if "429" not in said] == []
