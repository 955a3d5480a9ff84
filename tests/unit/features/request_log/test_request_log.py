"""The log of a gateway: rows are written in the background, and each loss is counted."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from benchmarks.waiting import until
from penstock.core.config import RequestLogSettings
from penstock.core.errors import Unavailable
from penstock.core.requests import InferRequest, PacketFields
from penstock.features.request_log import request_log as module
from penstock.features.request_log.log_query import LogQuery
from penstock.features.request_log.log_stores.log_store import open_log_store
from penstock.features.request_log.request_log import RequestLog
from penstock.telemetry.metrics import RequestLogMetrics


class Logged:
    def __init__(self, data_dir: Path, **settings: int) -> None:
        self.registry = CollectorRegistry()
        found = RequestLogSettings.model_validate({"url": "sqlite:///requests.db", **settings})
        self.log = RequestLog(open_log_store(found, data_dir), found, "gateway-0", RequestLogMetrics(self.registry))

    def add(self, count: int, data: bytes = b"{}") -> None:
        for number in range(count):
            request = InferRequest("m", [], request_id=str(number), packet=PacketFields("s", data=data))
            self.log.add(request, None, "ok", 0.001, 0)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"penstock_request_log_{name}", labels) or 0.0


async def test_rows_are_written_in_the_background(tmp_path: Path) -> None:
    logged = Logged(tmp_path)
    await logged.log.start()
    logged.add(3)
    await until(lambda: logged.metric("rows_total") == 3)
    assert len(await logged.log.find(LogQuery(session_id="s"))) == 3
    await logged.log.close()


async def test_the_last_rows_are_written_at_shutdown(tmp_path: Path) -> None:
    logged = Logged(tmp_path)
    await logged.log.start()
    logged.add(5000)
    await logged.log.close()
    again = Logged(tmp_path)
    assert len(await again.log.find(LogQuery(limit=9999))) == 5000
    await again.log.close()
    again.add(2)
    assert again.metric("lost_total", reason="shutdown") == 2


async def test_a_request_without_an_id_gets_one(tmp_path: Path) -> None:
    logged = Logged(tmp_path)
    for _ in range(2):
        logged.log.add(InferRequest("m", []), None, "ok", 0.001, 0)
    await logged.log.start()
    await logged.log.close()
    again = Logged(tmp_path)
    first, second = await again.log.find(LogQuery())
    assert len(first.request_id) == 32
    assert first.request_id != second.request_id
    await again.log.close()


async def test_rows_that_find_no_room_are_counted(tmp_path: Path) -> None:
    logged = Logged(tmp_path, buffer_bytes=64 * 1024)
    logged.add(100, b"x" * 3072)
    assert logged.metric("lost_total", reason="buffer_full") == 84
    await logged.log.start()
    await logged.log.close()
    assert logged.metric("rows_total") == 16


async def test_an_outage_of_the_store_is_logged_once_and_rows_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    folder = tmp_path / "data"
    folder.write_text("a file where the folder should be")
    logged = Logged(folder)
    with capture_logs() as lines:
        await logged.log.start()
        logged.add(3)
        await until(lambda: logged.metric("failures_total") >= 3)
        with pytest.raises(Unavailable, match="does not answer now"):
            await logged.log.find(LogQuery())
        logged.log.publish()
        assert (logged.metric("waiting"), logged.metric("rows_total")) == (3, 0)
        folder.unlink()
        await until(lambda: logged.metric("rows_total") == 3)
    events = [line["event"] for line in lines if line["event"] != "request_log_not_read"]
    assert events == ["request_log_unavailable", "request_log_recovered"]
    await logged.log.close()


async def test_rows_that_cannot_be_written_at_shutdown_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.write_text("a file where the folder should be")
    logged = Logged(folder)
    logged.add(3)
    await logged.log.close()
    assert logged.metric("lost_total", reason="shutdown") == 3


async def test_a_request_that_cannot_be_logged_is_counted_and_not_failed(tmp_path: Path) -> None:
    logged = Logged(tmp_path)
    broken = InferRequest("m", [None])  # type: ignore[list-item]
    with capture_logs() as lines:
        for _ in range(3):
            logged.log.add(broken, None, "ok", 0.001, 0)
    assert [line["event"] for line in lines] == ["request_not_logged"]
    assert logged.metric("lost_total", reason="bug") == 3
    await asyncio.wait_for(logged.log.close(), 5)
