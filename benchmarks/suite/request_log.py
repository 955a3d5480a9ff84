"""The request log in PostgreSQL: rows per second that one gateway writes, and the time of a query in a large table."""

import asyncio
import json
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from statistics import median

from prometheus_client import CollectorRegistry

from benchmarks.postgres import Postgres
from benchmarks.server import ServerProcess
from benchmarks.suite.figures import SuiteFigure
from penstock.core.config import RequestLogSettings
from penstock.core.requests import InferRequest, PacketFields
from penstock.features.request_log.log_row import RequestEnd, make_log_row
from penstock.features.request_log.log_stores.log_store import LogStore, open_log_store
from penstock.features.request_log.request_log import RequestLog
from penstock.models.convert.speed import spread
from penstock.models.samples.noop import NOOP, write_noop
from penstock.telemetry.metrics import RequestLogMetrics

DATA = json.dumps({"text": ["x" * 1000]}).encode()  # 1 KB
SESSION_ROWS = 100
DAYS = 10  # over which the rows of the large table are distributed
WAITING_ROWS = 20_000  # that the load keeps in the buffer
BATCH = 2000
SPREAD = 0x9E3779B97F4A7C15F39CC0605CEDC835  # odd, so that multiples modulo 2^128 are unique
QUERIES = 300
# Durable writes; memory and write-ahead log as for a server that has to keep up.
SETTINGS = ("fsync=on", "shared_buffers=1GB", "max_wal_size=8GB", "checkpoint_timeout=15min")
Say = Callable[[str], None]


def measure_request_log(folder: Path, is_quick: bool, say: Say) -> list[SuiteFigure]:
    settings = {"payload_bytes": 4096, "buffer_bytes": 256 * 1024 * 1024}
    window_s, rounds, rows = (2.0, 3, 50_000) if is_quick else (5.0, 7, 1_000_000)
    with Postgres(folder / "postgres", *SETTINGS) as postgres:
        found = RequestLogSettings.model_validate({"url": postgres.url, **settings})
        per_s = asyncio.run(_write(found, folder, window_s, rounds))
        say(f"  request log: {median(per_s):,.0f} rows/s written")
        postgres.run_sql("DROP TABLE block_inference")
        asyncio.run(_fill(found, folder, rows))
        postgres.run_sql("ANALYZE block_inference")
        took_ms = _measure_query(postgres.url, folder, rows)
    say(f"  request log: a session among {rows:,} rows in {median(took_ms):.2f} ms over REST")
    return [
        SuiteFigure("log_rows_s", median(per_s), spread(per_s), 20_000, rounds=rounds),
        SuiteFigure("log_query_ms", median(took_ms), spread(took_ms), 10, is_ceiling=True, rounds=len(took_ms)),
    ]


def _make_request(number: int, session: int) -> InferRequest:
    packet = PacketFields(f"sess-{session}", number, time.time(), DATA)
    request_id = f"{number * SPREAD % 2**128:032x}"  # distributed like random ids
    return InferRequest("minilm", [], request_id=request_id, protocol="grpc", size_bytes=len(DATA), packet=packet)


async def _write(settings: RequestLogSettings, folder: Path, window_s: float, rounds: int) -> list[float]:
    """Return the rows per second that the log of a gateway writes in each window, while its buffer is never empty."""
    registry = CollectorRegistry()
    log = RequestLog(open_log_store(settings, folder), settings, "gateway-0", RequestLogMetrics(registry))
    found, added = list[float](), 0

    def written() -> float:
        return registry.get_sample_value("penstock_request_log_rows_total") or 0.0

    await log.start()
    for number in range(rounds + 1):
        started, before = time.monotonic(), written()
        while time.monotonic() < started + window_s:
            for _ in range(min(100, WAITING_ROWS - added + int(written()))):
                log.add(_make_request(added, added // SESSION_ROWS), None, "ok", 0.002, 100)
                added += 1
            await asyncio.sleep(0)
        if number:  # the first window warms up
            found.append((written() - before) / (time.monotonic() - started))
    await log.close()
    assert written() == added, f"{added - written():g} rows were lost"
    return found


async def _fill(settings: RequestLogSettings, folder: Path, rows: int) -> None:
    """Write rows of many sessions, each of which lasts some days."""
    store: LogStore = open_log_store(settings, folder)
    now_s, sessions = time.time(), rows // SESSION_ROWS
    for start in range(0, rows, BATCH):
        batch = []
        for number in range(start, min(start + BATCH, rows)):
            # One row of each session in turn, so that the rows of a session are apart in the table.
            end = RequestEnd("ok", now_s - DAYS * 86_400 * (1 - number / rows), 0.002, 100)
            batch.append(make_log_row(_make_request(number, number % sessions), None, end, "gateway-0", 4096))
        await store.write(batch)
    await store.close()


def _measure_query(url: str, folder: Path, rows: int) -> list[float]:
    """Return the milliseconds that a server takes for the log of a session, of each query."""
    random, found = Random(2), list[float]()
    write_noop(folder / "models" / NOOP)
    with ServerProcess(folder / "models", folder / "server", settings={"request_log": {"url": url}}) as server:
        connection = HTTPConnection("127.0.0.1", server.http_port, timeout=30)
        for number in range(QUERIES + 20):
            started = time.perf_counter()
            connection.request("GET", f"/logs/session/sess-{random.randrange(rows // SESSION_ROWS)}")
            body = connection.getresponse().read()
            if number >= 20:  # the first ones open the gateway's connections
                found.append((time.perf_counter() - started) * 1e3)
            assert len(json.loads(body)["items"]) == SESSION_ROWS
        connection.close()
    return found
