"""Measure the five quotas under the load of 50 clients, over two gateways that share Redis."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from benchmarks.server import ServerProcess
from benchmarks.valkey import Valkey
from tests.chaos.report import ChaosPlan, Result
from tests.servers import floats_json, write_identity

CLIENTS = 50
PER_SECOND, BLOCK_PER_SECOND, SESSION_PER_SECOND = 100, 40, 20
SESSIONS = 3  # together below the quotas of the server and of two blocks
PAUSE_S = 0.05  # of a client after a refusal
SETTLE_S = 1.0  # after the first refusal, the burst is used up
REFUSALS = 5  # of each client after a total is used up
TIMEOUT_S = 60.0
TOTAL_S = 180.0  # for one part
YEAR_S = 31_536_000
MANY, ONE, TWO = ("a0", "a1", "a2", "a3"), ("b",), ("c0", "c1")  # blocks of the three parts
BLOCK_TOTAL, SESSION_TOTAL = "requests_per_block_id", "requests_per_session_id"


@dataclass
class Answers:
    passed: list[tuple[float, str]] = field(default_factory=list)  # when, and of which session
    refused: list[tuple[float, str]] = field(default_factory=list)  # when, and by which quota

    def rate_error(self, per_second: float, window_s: float) -> float:
        """Return the difference between the rate and the quota, after the burst is used up, as a share of the quota."""
        begin = self.refused[0][0] + SETTLE_S
        assert all(not begin <= at < begin + window_s for at, by in self.refused if by in (BLOCK_TOTAL, SESSION_TOTAL))
        counted = sum(begin <= at < begin + window_s for at, _ in self.passed)
        return abs(counted - per_second * window_s) / (per_second * window_s)


class QuotaLoad:
    def __init__(self, server: ServerProcess, http: aiohttp.ClientSession) -> None:
        self._server = server
        self._http = http
        self._numbers = itertools.count()

    async def run(self, blocks: tuple[str, ...], sessions: int, is_over: Callable[[Answers, str], bool]) -> Answers:
        """Send requests to the blocks in turn until `is_over`, which gets the answers and a client's last refusal.

        `sessions` 0: each request has a session of its own.
        """
        answers = Answers()

        async def call(client: int) -> None:
            last_refusals = 0
            while last_refusals < REFUSALS:
                number = next(self._numbers)
                session = str(client % sessions if sessions else f"of-{number}")
                refused_by = await self._send(blocks[number % len(blocks)], f"{blocks[0]}-{session}")
                now = time.monotonic()
                if not refused_by:
                    answers.passed.append((now, session))
                    continue
                answers.refused.append((now, refused_by))
                last_refusals += is_over(answers, refused_by)
                await asyncio.sleep(PAUSE_S)

        async with asyncio.timeout(TOTAL_S):
            await asyncio.gather(*map(call, range(CLIENTS)))
        return answers

    async def _send(self, model: str, session_id: str) -> str:
        """Return the quota that refused a request, or an empty text."""
        body = {**floats_json(1.0), "parameters": {"session_id": session_id}}
        async with self._http.post(f"{self._server.http_url}/v2/models/{model}/infer", json=body) as answer:
            assert answer.status in (200, 429), await answer.text()
            await answer.read()
            return "" if answer.status == 200 else answer.headers["penstock-limit"]


async def run(plan: ChaosPlan) -> Result:
    models = plan.folder / "models"
    for name in (*MANY, *ONE, *TWO):
        write_identity(models, name, "FP32")
    window_s = 8.0 if plan.is_quick else 15.0
    block_total = round(BLOCK_PER_SECOND * (window_s + 8))
    session_total = round(SESSION_PER_SECOND * (window_s + 5))
    quotas = {
        "requests_per_second_total": PER_SECOND,
        "requests_per_second_per_block_id": BLOCK_PER_SECOND,
        "requests_per_second_per_session": SESSION_PER_SECOND,
        BLOCK_TOTAL: block_total,
        SESSION_TOTAL: session_total,
        "reset_s": YEAR_S,
    }
    result = Result()
    connector, timeout = aiohttp.TCPConnector(limit=CLIENTS), aiohttp.ClientTimeout(total=TIMEOUT_S)
    with Valkey(plan.folder / "valkey") as valkey:
        settings = {"access": {"limits_url": valkey.url}, "quotas": quotas}
        with ServerProcess(models, plan.folder, "--gateways", "2", settings=settings) as server:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
                load = QuotaLoad(server, http)
                whole_s = SETTLE_S + window_s
                server_wide = await load.run(
                    MANY, 0, lambda answers, _: time.monotonic() > answers.refused[0][0] + whole_s
                )
                block = await load.run(ONE, 0, lambda _, refused_by: refused_by == BLOCK_TOTAL)
                session = await load.run(TWO, SESSIONS, lambda _, refused_by: refused_by == SESSION_TOTAL)
            result.details["tracebacks"] = dict(server.tracebacks())
    by_session = Counter(each for _, each in session.passed)
    errors = {
        "requests_per_second_total": server_wide.rate_error(PER_SECOND, window_s),
        "requests_per_second_per_block_id": block.rate_error(BLOCK_PER_SECOND, window_s),
        "requests_per_second_per_session": session.rate_error(SESSIONS * SESSION_PER_SECOND, window_s),
        BLOCK_TOTAL: abs(len(block.passed) - block_total) / block_total,
        SESSION_TOTAL: max(abs(count - session_total) / session_total for count in by_session.values()),
    }
    result.details["errors"] = errors
    result.must("quota_error", max(errors.values()), high=0.01)
    return result
