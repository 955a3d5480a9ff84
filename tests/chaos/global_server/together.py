"""Kill and restart gateways, Redis and PostgreSQL under all kinds of load.

Each request has an id, by which its row in the request log is found. Each answer is compared with the documentation.

"""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from uuid import uuid4

import aiohttp
import grpc

from benchmarks.postgres import Postgres
from benchmarks.server import ServerProcess
from benchmarks.valkey import Valkey
from benchmarks.waiting import until_seen
from penstock.pb.blocks import inference_pb2 as pb
from penstock.pb.blocks.inference_pb2_grpc import BlockInferenceServiceStub
from tests.chaos.report import ChaosPlan, Result
from tests.servers import floats_json, log_lines, write_identity

CLIENTS = 4  # of each kind
PER_SECOND = 400  # the quota of the server: reached now and then
SESSION_TOTAL = 150  # the quota of a session
BUFFER_BYTES = 1024 * 1024  # of one gateway's log
TIMEOUT_S = 60.0
END_S = 90.0  # for asynchronous requests and rows to come to an end
NEAR_KILL_S = 2.0  # rows of requests this long before a gateway's death may have waited in its memory
SESSION_ERROR = 0.05  # gateways report what they counted alone up to half a second after an outage of Redis
FEW_ROWS = 200
PAUSE_S = 0.02
MODEL = "identity"


@dataclass
class ObservedAnswers:
    answered: dict[str, float] = field(default_factory=dict)  # when a request was answered, by its id
    passed: Counter[str] = field(default_factory=Counter)  # requests that ran, by session
    last_passed: dict[str, float] = field(default_factory=dict)  # when the last of a session ran
    codes: Counter[str] = field(default_factory=Counter)
    broken: list[float] = field(default_factory=list)  # when a connection broke
    accepted: dict[str, float] = field(default_factory=dict)  # places of asynchronous requests, and when
    kills: list[float] = field(default_factory=list)  # of gateways
    unexpected: list[str] = field(default_factory=list)


class MixedLoad:
    """Clients of each kind that send requests one after the other until `is_over`."""

    def __init__(self, server: ServerProcess, seen: ObservedAnswers) -> None:
        self._server = server
        self._seen = seen
        self.is_over = False

    async def run(self, faults: Callable[[], Awaitable[None]]) -> None:
        kinds = (self._send_rest, self._send_packets, self._send_asynchronous)
        clients = [asyncio.create_task(kind(number)) for kind in kinds for number in range(CLIENTS)]
        try:
            await faults()
        finally:
            self.is_over = True
            await asyncio.gather(*clients)

    async def _send_rest(self, number: int) -> None:
        """Send REST requests in a few sessions, whose quotas run out."""
        while not self.is_over:
            await self._post(f"shared-{len(self._seen.answered) // 1000}-{number}", {})

    async def _send_asynchronous(self, number: int) -> None:
        while not self.is_over:
            await self._post(uuid4().hex, {"prefer": "respond-async"})
            await asyncio.sleep(PAUSE_S)

    async def _post(self, session: str, headers: dict[str, str]) -> None:
        request_id, seen = uuid4().hex, self._seen
        body = {**floats_json(1.0), "parameters": {"session_id": session}}
        url = f"{self._server.http_url}/v2/models/{MODEL}/infer"
        try:  # a connection of its own reaches any of the gateways
            async with (
                _make_session() as http,
                http.post(url, json=body, headers={"x-request-id": request_id, **headers}) as answer,
            ):
                text = await answer.text()
        except (aiohttp.ClientError, ConnectionError) as error:
            self._record_broken(repr(error))
            return
        code = answer.headers.get("penstock-code", "")
        self._record_answer(request_id, session, answer.status, code, text, is_logged=not headers)
        if answer.status == 202:
            seen.accepted[answer.headers["location"]] = time.monotonic()

    async def _send_packets(self, number: int) -> None:
        data = json.dumps({"inputs": {"x": [[1.0]]}})
        while not self.is_over:
            async with grpc.aio.insecure_channel(self._server.grpc) as channel:
                infer = BlockInferenceServiceStub(channel).infer
                session, request_id = uuid4().hex, uuid4().hex
                packet = pb.BlockInferencePacket(block_id=MODEL, session_id=session, seq_no=2**64 - 1, data=data)
                try:
                    answer = await infer(packet, timeout=TIMEOUT_S, metadata=(("x-request-id", request_id),))
                except grpc.aio.AioRpcError as error:
                    code = str(dict(error.trailing_metadata() or ()).get("penstock-code", ""))
                    if code:
                        self._record_answer(
                            request_id, session, 429 if code == "rate_limited" else 500, code, repr(error)
                        )
                    else:
                        self._record_broken(repr(error))
                    continue
                assert answer.seq_no == 2**64 - 1
                self._record_answer(request_id, session, 200, "", "")

    def _record_answer(
        self, request_id: str, session: str, status: int, code: str, text: str, is_logged: bool = True
    ) -> None:
        seen = self._seen
        seen.codes[code or str(status)] += 1
        is_waiting = status == 503 and code == "store_unavailable" and not is_logged
        if status not in (200, 202, 429) and not is_waiting:
            seen.unexpected.append(f"{status} {code} {text[:200]}")
        if is_logged:
            seen.answered[request_id] = time.monotonic()
            if status == 200:
                seen.passed[session] += 1
                seen.last_passed[session] = time.monotonic()

    def _record_broken(self, text: str) -> None:
        self._seen.broken.append(time.monotonic())
        self._seen.codes["broken connection"] += 1
        if not any(0 <= time.monotonic() - at < NEAR_KILL_S for at in self._seen.kills):
            self._seen.unexpected.append(text)


async def run(plan: ChaosPlan) -> Result:
    plan = replace(plan, folder=plan.folder / "together")  # the other parts have their own files in the folder
    plan.folder.mkdir()
    write_identity(plan.folder / "models", MODEL, "FP32")
    calm_s, away_s = (2.0, 4.0) if plan.is_quick else (5.0, 12.0)
    seen, result = ObservedAnswers(), Result()
    with (
        Valkey(plan.folder / "valkey", "--appendonly", "yes", "--appendfsync", "no") as valkey,
        Postgres(plan.folder / "postgres") as postgres,
    ):
        settings = {
            "access": {"limits_url": valkey.url},
            "async_requests": {"url": valkey.url, "max_requests": 1_000_000},
            "quotas": {"requests_per_second_total": PER_SECOND, "requests_per_session_id": SESSION_TOTAL},
            "request_log": {"url": postgres.url, "buffer_bytes": BUFFER_BYTES},
        }
        with ServerProcess(
            plan.folder / "models", plan.folder / "server", "--gateways", "2", settings=settings
        ) as server:
            load = MixedLoad(server, seen)
            started = time.monotonic()
            await load.run(lambda: _cause_faults(server, valkey, postgres, seen, calm_s, away_s))
            loaded_s = time.monotonic() - started
            states = await _count_end_states(server, seen)
            await until_seen(
                lambda: not server.metric("penstock_request_log_waiting"), "every row is written or lost", END_S
            )
            lost = int(server.metric("penstock_request_log_lost"))
            result.details["tracebacks"] = dict(server.tracebacks())
        logged = set(postgres.run_sql("SELECT request_id FROM block_inference").split())
    missing = [at for request_id, at in seen.answered.items() if request_id not in logged]
    near = sum(any(abs(kill - at) < NEAR_KILL_S for kill in seen.kills) for at in missing)
    # A gateway that is killed while Redis is away forgets what it has counted alone.
    allowed = PER_SECOND * (loaded_s + 1 + len(seen.kills)) * 1.01
    most = max(count for session, count in seen.passed.items() if seen.last_passed[session] < seen.kills[-1])
    result.details |= {
        "answers": dict(seen.codes),
        "asynchronous": dict(states),
        "rows": len(logged),
        "counted_lost": lost,
        "missing": len(missing),
        "missing_by_second": dict(sorted(Counter(round(at - started) for at in missing).items())),
        "kills": [round(at - started, 1) for at in seen.kills],
        "missing_before_a_kill": near,
        "unexpected": seen.unexpected[:10],
        "most_of_a_session": max(seen.passed.values()),
        "most_before_the_last_kill": most,
    }
    result.must("together_unexpected", len(seen.unexpected), high=0)
    # A connection breaks for each request that was in flight at a killed gateway, and for no others.
    result.must("together_broken", len(seen.broken), high=len(seen.kills) * 3 * CLIENTS)
    result.must("together_log_uncounted", max(0, len(missing) - near - lost), high=0)
    result.must("together_async_unfinished", states["running"] + states["failed"], high=0)
    result.must("together_async_lost", states["lost"], high=len(seen.kills) * CLIENTS)
    result.must("together_quota_over", max(0.0, sum(seen.passed.values()) / allowed - 1), high=0)
    result.must("together_session_over", max(0.0, most / SESSION_TOTAL - 1), high=SESSION_ERROR)
    return result


async def _cause_faults(
    server: ServerProcess, valkey: Valkey, postgres: Postgres, seen: ObservedAnswers, calm_s: float, away_s: float
) -> None:
    """Kill each process alone, and then all of them at once."""

    async def cause_outage(*services: Valkey | Postgres) -> None:
        for service in services:
            await asyncio.to_thread(service.kill)
        await asyncio.sleep(away_s)
        for service in services:
            await asyncio.to_thread(service.start)
        await asyncio.sleep(calm_s)

    async def kill_gateway(name: str) -> None:
        gateways, was_ready = await asyncio.to_thread(server.children, "gateway"), _count_starts(server, name)
        seen.kills.append(time.monotonic())
        os.kill(gateways[name], signal.SIGKILL)
        await until_seen(lambda: _count_starts(server, name) > was_ready, "the gateway is back", TIMEOUT_S)
        await asyncio.sleep(calm_s)

    async def wait_for_log() -> None:
        """Wait until few log rows are unwritten, because a killed gateway loses its rows."""
        await until_seen(lambda: server.metric("penstock_request_log_waiting") < FEW_ROWS, "few rows wait", TIMEOUT_S)

    await asyncio.sleep(calm_s)
    await cause_outage(valkey)
    await cause_outage(postgres)
    await wait_for_log()
    await kill_gateway("gateway-0")
    await wait_for_log()
    await asyncio.gather(cause_outage(valkey, postgres), kill_gateway("gateway-1"))


def _count_starts(server: ServerProcess, gateway: str) -> int:
    """Return how often a gateway, or one that replaced it, became ready."""
    events = [each for each in log_lines(server.log) if each["event"] == "readiness_changed" and each["ready"]]
    return sum(each.get("gateway") == gateway for each in events)


async def _count_end_states(server: ServerProcess, seen: ObservedAnswers) -> Counter[str]:
    """Return the end states of the asynchronous requests; check the results of successful ones."""
    states: Counter[str] = Counter()
    deadline = time.monotonic() + END_S
    async with _make_session() as http:
        for place in seen.accepted:
            while True:
                async with http.get(f"{server.http_url}{place}") as answer:
                    record = await answer.json()
                state = record.get("state", f"status {answer.status}")
                if record.get("status") == 429:
                    state = "refused"  # by a quota
                if state != "running" or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.1)
            if state == "succeeded":
                async with http.get(f"{server.http_url}{place}/result") as answer:
                    outputs = (await answer.json()).get("outputs", [{}])
                    state = state if outputs[0].get("data") == [1.0] else f"result {answer.status}"
            states[state] += 1
    return states


def _make_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
