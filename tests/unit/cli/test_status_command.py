"""`penstock status` against servers that answer as the test says."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from penstock.cli import main as cli
from penstock.core.errors import PenstockError

RUNNING = {"platform": "openvino", "precision": "bf16", "device": "cpu", "note": "chosen: faster"}
STATUS = {
    "server": "penstock",
    "version": "9",
    "ready": False,
    "draining": False,
    "inflight_requests": 3,
    "inflight_bytes": 10,
    "workers": [{"id": "worker-0", "pid": 7, "jobs": 2, "memory_bytes": 2**20, "blocks": ["blk-1"]}],
    "blocks": [{"block_id": "blk-1", "model": "m", "version": "1", "state": "failed", "reason": "no graph"} | RUNNING],
    "devices": [
        {
            "uuid": "GPU-1",
            "name": "NVIDIA H",
            "memory_bytes": 4 * 2**30,
            "used_bytes": 2**30,
            "busy": 0.25,
            "workers": ["worker-0"],
            "blocks": {"blk-1": 2**29},
        }
    ],
    "queues": {"blk-1": {"waiting": 4, "running": 5}},
    "limits": {"store": "redis", "away": True, "share": 0.5},
    "generation": {
        "blk-1": {
            "running": 8,
            "waiting": 1,
            "cache_blocks": 64,
            "cache_blocks_used": 16,
            "steps": 5,
            "prompt_tokens": 311,
            "cached_tokens": -1,
            "generated_tokens": 412,
            "preemptions": 2,
        }
    },
}


class Answer(BaseHTTPRequestHandler):
    url, status, body, shown = "", 200, b"", ""

    def do_GET(self) -> None:
        type(self).shown = self.headers.get("authorization", "")
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body if self.path == "/v1/status" else b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def answer() -> Iterator[type[Answer]]:
    class Mine(Answer):
        pass

    server = HTTPServer(("127.0.0.1", 0), Mine)
    Mine.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Mine
    server.shutdown()
    thread.join()
    server.server_close()


def test_status_sends_the_key_of_the_environment(answer: type[Answer]) -> None:
    answer.body = json.dumps(STATUS).encode()
    for environment, shown in (({"PENSTOCK_API_KEY": "psk_mine"}, "Bearer psk_mine"), ({}, "")):
        CliRunner().invoke(cli.app, ["status", "--server", answer.url], env=environment)
        assert answer.shown == shown


def test_tables_show_the_servers_answer(answer: type[Answer]) -> None:
    answer.body = json.dumps(STATUS).encode()
    shown = CliRunner().invoke(cli.app, ["status", "--server", answer.url], env={"COLUMNS": "140"}).output
    for expected in (
        "penstock 9",
        "not ready",
        "3 requests",
        "Redis is unavailable",
        "worker-0",
        "1 MiB",
        "blk-1",
        "no graph",
        "m 1: chosen: faster",
        "1.0 GiB of 4.0 GiB",
        "3.0 GiB",
        "25%",
        "m 512 MiB",
    ):
        assert expected in shown
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()]
    assert next(row for row in rows if "blk-1" in row)[4:7] == ["openvino bf16 cpu", "4", "5"]
    assert ["m", "8", "1", "16 of 64", "311", "-", "412", "2"] in rows


def test_json_is_the_servers_answer(answer: type[Answer]) -> None:
    answer.body = json.dumps(STATUS).encode()
    result = CliRunner().invoke(cli.app, ["status", "--json", "--server", answer.url + "/"])
    assert json.loads(result.output) == STATUS


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [(404, b"", "answered 404"), (200, b"<html>", "did not return a status"), (200, b"{}", "try --json")],
)
def test_answers_of_other_servers_are_errors(answer: type[Answer], status: int, body: bytes, message: str) -> None:
    answer.status, answer.body = status, body
    result = CliRunner().invoke(cli.app, ["status", "--server", answer.url])
    assert isinstance(result.exception, PenstockError)
    assert message in result.exception.message
