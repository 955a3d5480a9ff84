"""Freeze and kill PostgreSQL under load: every row of the request log must be stored once or counted as lost."""

import asyncio
import time
from collections.abc import Callable
from statistics import quantiles

import httpx

from benchmarks.postgres import Postgres
from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from tests.chaos.report import ChaosPlan, Result
from tests.servers import floats_json, write_identity

CLIENTS = 16
BUFFER_BYTES = 256 * 1024  # of one gateway: less than the load of the outage, so that rows are lost
TIMEOUT_S = 30.0
TABLE = "block_inference"


class LogLoad:
    """Clients that send requests one after the other, with the latency of each."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._is_over = False
        self.failures = 0
        self.latencies: list[tuple[float, float]] = []  # when a request was sent, and its latency

    async def run(self, faults: Callable[[], object]) -> None:
        """Send requests until `faults`, which runs in a thread, has returned."""
        clients = [asyncio.create_task(self._send()) for _ in range(CLIENTS)]
        await asyncio.to_thread(faults)
        self._is_over = True
        await asyncio.gather(*clients)

    def p99_s(self, start: float, end: float) -> float:
        return quantiles([took for sent, took in self.latencies if start <= sent < end], n=100)[-1]

    async def _send(self) -> None:
        async with httpx.AsyncClient(base_url=self._server.http_url, timeout=TIMEOUT_S) as http:
            while not self._is_over:
                sent = time.monotonic()
                answer = await http.post("/v2/models/identity/infer", json=floats_json(1.0))
                self.failures += answer.status_code != 200
                self.latencies.append((sent, time.monotonic() - sent))


async def run(plan: ChaosPlan) -> Result:
    models = plan.folder / "models"
    write_identity(models, "identity", "FP32")
    calm_s, away_s = (3.0, 4.0) if plan.is_quick else (5.0, 10.0)
    result = Result()
    moments: list[float] = []

    def stop_twice() -> None:
        for stop, go_on in ((postgres.freeze, postgres.thaw), (postgres.kill, postgres.start)):
            moments.append(time.monotonic())
            time.sleep(calm_s)
            stop()
            moments.append(time.monotonic())
            time.sleep(away_s)
            go_on()
            moments.append(time.monotonic())
        time.sleep(calm_s)

    with Postgres(plan.folder / "postgres") as postgres:
        settings = {"request_log": {"url": postgres.url, "buffer_bytes": BUFFER_BYTES}}
        with ServerProcess(models, plan.folder / "server", "--gateways", "2", settings=settings) as server:
            load = LogLoad(server)
            await load.run(stop_twice)
            is_written = _make_written_check(server)
            await until_seen(is_written, "every row is written or lost", TIMEOUT_S)
            lost = server.metric("penstock_request_log_lost")
            written = server.metric("penstock_request_log_rows")
            result.details["tracebacks"] = dict(server.tracebacks())
        rows = int(postgres.run_sql(f"SELECT count(*) FROM {TABLE}"))
    sent = len(load.latencies)
    before, away = load.p99_s(moments[0], moments[1]), load.p99_s(moments[1], moments[2])
    result.details |= {
        "sent": sent,
        "rows": rows,
        "counted_rows": written,
        "lost": lost,
        "p99_before_ms": round(before * 1e3, 2),
        "p99_away_ms": round(away * 1e3, 2),
    }
    result.must("log_missing", sent - rows - lost, low=0, high=0)
    result.must("log_failed", load.failures, high=0)
    result.must("log_lost", lost, low=1)  # the outage was long enough to fill the buffer
    result.must("log_p99_away_over_before", away / before, high=1.5)
    return result


def _make_written_check(server: ServerProcess) -> Callable[[], bool]:
    """Return a function that returns True once the metrics show no waiting rows twice in a row."""
    empty = [0.0]

    def is_written() -> bool:
        waiting, now = server.metric("penstock_request_log_waiting"), time.monotonic()
        empty[0] = 0.0 if waiting else empty[0] or now
        return bool(empty[0]) and now - empty[0] > 1.0

    return is_written
