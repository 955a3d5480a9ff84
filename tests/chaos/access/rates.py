"""Measure a caller's rate limit, which two gateways share in Redis.

Admitted requests are compared with the limit, also while Redis is down.

"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.server import ServerProcess
from benchmarks.valkey import Valkey
from benchmarks.waiting import until, until_seen
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.checked_load import EchoQuestion
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import add_echo

CLIENTS = 50
GATEWAYS = 2
RATE, BURST_S = 100.0, 1.0  # shared by all clients
PAUSE_S = 0.1  # of a refused client: together the clients want a multiple of the limit
ANSWER_S = 30.0
LIMITED = "rate_limited"
# Events to await in every gateway's log.
AWAY, BACK = "limits_not_shared", "limits_shared_again"


@dataclass(slots=True)
class RateTally:
    """Outcomes of the clients' requests since `began`."""

    began: float
    admitted: int = 0
    refused: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def note(self, code: str) -> None:
        if code == LIMITED:
            self.refused += 1
        else:
            self.failures[code] += 1

    def error(self, end: float, burst: float) -> float:
        """Return the difference between admitted requests and the limit, as a share of the limit."""
        allowed = RATE * (end - self.began) + burst
        return abs(self.admitted - allowed) / allowed

    def details(self, end: float, burst: float) -> dict[str, Any]:
        return {
            "seconds": round(end - self.began, 3),
            "admitted": self.admitted,
            "allowed": round(RATE * (end - self.began) + burst, 1),
            "refused": self.refused,
            "failures": dict(self.failures),
        }


class Clients:
    """Clients with one connection each, which retry as soon as allowed. The server counts them as one caller."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self.tallies: list[RateTally] = []  # all active clients together

    async def __aenter__(self) -> "Clients":
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    def count(self) -> RateTally:
        """Start a new count of the clients' requests."""
        tally = RateTally(time.monotonic())
        self.tallies.append(tally)
        return tally

    async def _ask(self, number: int) -> None:
        question = EchoQuestion()
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(self._target, options=options) as channel:
            infer: Any = GRPCInferenceServiceStub(channel).ModelInfer
            while not self._is_over:
                try:
                    await infer(question.ask(number), timeout=ANSWER_S)
                except grpc.aio.AioRpcError as error:
                    code = str(dict(error.trailing_metadata() or ()).get("penstock-code", error.code().name))
                    for tally in self.tallies:
                        tally.note(code)
                    await asyncio.sleep(PAUSE_S)
                else:
                    for tally in self.tallies:
                        tally.admitted += 1


async def run(plan: ChaosPlan, settings: Mapping[str, Any] | None = None) -> Result:
    span_s = 15.0 if plan.is_quick else 40.0
    repository = plan.folder / "rate-models"
    add_echo(repository, layers=1)
    with Valkey(plan.folder / "rate-redis") as redis:
        limits = {"requests_per_s": RATE, "burst_s": BURST_S}
        settings = {**(settings or {}), "access": {"limits_url": redis.url, "anonymous_limits": limits}}
        flags = ("--gateways", str(GATEWAYS), "--workers", "1")
        with ServerProcess(repository, plan.folder / "rates", *flags, settings=settings) as server:
            await server.wait_all_workers()
            return await _measure(plan, server, redis, span_s)


async def _measure(plan: ChaosPlan, server: ServerProcess, redis: Valkey, span_s: float) -> Result:
    clients = Clients(server.grpc)
    whole = clients.count()
    details: dict[str, Any] = {}
    errors: dict[str, float] = {}
    told = 0

    async def phase(name: str, burst: float = 0.0) -> None:
        plan.say(name)
        tally = whole if burst else clients.count()
        await asyncio.sleep(span_s)
        end = time.monotonic()
        errors[name] = tally.error(end, burst)
        details[name] = tally.details(end, burst)

    async with clients:
        await until(lambda: whole.admitted, "the first is answered")
        whole.began = time.monotonic()
        await phase("shared", RATE * BURST_S)
        redis.kill()
        await until_seen(
            lambda: _count_gateways_without_redis(server) == GATEWAYS, "every gateway reports that Redis is unavailable"
        )
        told += server.status()["limits"]["away"] is True
        await phase("away")
        redis.start()
        await until_seen(lambda: _count_gateways_without_redis(server) == 0, "every gateway reports that Redis is back")
        told += server.status()["limits"]["away"] is False
        await phase("back")
        end = time.monotonic()
        errors["whole"], details["whole"] = whole.error(end, RATE * BURST_S), whole.details(end, RATE * BURST_S)
    lines = server.log.read_text(errors="replace")
    told += lines.count(AWAY) == lines.count(BACK) == GATEWAYS
    result = Result(details=details | {"errors": errors, "tracebacks": dict(server.tracebacks())})
    result.must("rate_error", max(errors["shared"], errors["whole"]), high=0.01)
    result.figures["rate_error_away"] = errors["away"]
    result.must("rate_failed", sum(whole.failures.values()), high=0)
    result.must("rate_outage_unreported", 3 - told, high=0)
    return result


def _count_gateways_without_redis(server: ServerProcess) -> float:
    return server.metric("penstock_limits_away")
