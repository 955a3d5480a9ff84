"""Kill Envoy, and send SIGTERM to the server, both under load."""

import asyncio
import os
import signal
import time
from collections import Counter

import grpc
import httpx
import numpy as np

from benchmarks.server import ServerProcess
from penstock.experiments.load.drivers import INFER
from penstock.models.samples.noop import NOOP, write_noop
from tests.chaos.calls import make_infer_request
from tests.chaos.edge.streamers import (
    CLOSED,
    REFUSED,
    SOCKET_UNACCEPTED,
    stream_until_gone,
    use_sockets_until_gone,
)
from tests.chaos.report import ChaosPlan, Result

CALLERS = 16
STREAMS = 4  # callers of each kind
KILLS = 3
BEFORE_S = 1.0
BACK_S = 3.0
GONE = "connect"  # a client that cannot connect: nothing was sent
LEFT = "OK, and asked to leave"  # an answer with `connection: close`: the next request opens a new connection
# A new connection that the kernel resets as the ports close, before Envoy has accepted it: the request was not read.
RESET, UNACCEPTED = "reset", "not accepted"


async def kill(plan: ChaosPlan) -> Result:
    """Kill Envoy several times; clients that retry must be answered soon."""
    write_noop(plan.folder / "models" / NOOP)
    with ServerProcess(plan.folder / "models", plan.folder / "kill", settings={"edge": "envoy"}) as server:
        waits = []
        for _ in range(KILLS):
            await _measure_recovery_s(server, BACK_S)
            before = server.edge_pid()
            os.kill(before, signal.SIGKILL)
            waits.append(await _measure_recovery_s(server, 10 * BACK_S))
        tracebacks = server.tracebacks().total()
    result = Result(details={"back_after_s": [round(each, 2) for each in waits]})
    result.must("edge_kill_back_s", max(waits), high=BACK_S)
    result.must("edge_kill_tracebacks", tracebacks, high=0)
    return result


async def drain(plan: ChaosPlan) -> Result:
    """Send SIGTERM under load.

    Every request on an accepted connection is answered, or refused before it ran if it was sent over a stream.
    """
    write_noop(plan.folder / "models" / NOOP)
    with ServerProcess(plan.folder / "models", plan.folder / "drain", settings={"edge": "envoy"}) as server:
        asking = [_ask_until_gone(server, number) for number in range(CALLERS)]
        asking += [ask(server) for ask in (stream_until_gone, use_sockets_until_gone) for _ in range(STREAMS)]
        callers = [asyncio.create_task(each) for each in asking]
        await asyncio.sleep(BEFORE_S)
        os.kill(server.pid, signal.SIGTERM)
        ended = [await caller for caller in callers]
        code = await asyncio.to_thread(server.process.wait, 60)
    counts = sum(ended, Counter[str]())
    result = Result(details={"answers": dict(counts), "exit_code": code})
    failed = counts.keys() - {"OK", LEFT, GONE, UNACCEPTED, SOCKET_UNACCEPTED, REFUSED, CLOSED}
    result.must("edge_drain_failed", sum(counts[what] for what in failed), high=0)
    unaccepted = counts[UNACCEPTED] + counts[SOCKET_UNACCEPTED]
    result.must("edge_drain_unaccepted", unaccepted, high=CALLERS // 2)  # once for each client over REST
    result.must("edge_drain_exit_code", code, low=0, high=0)
    return result


async def _measure_recovery_s(server: ServerProcess, seconds: float) -> float:
    """Retry over new connections until gRPC and REST answer; return the seconds that this took."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        if await _ask_grpc_once(server) == "OK" and await _ask_rest_once(server) == "OK":
            return time.monotonic() - began
        await asyncio.sleep(0.02)
    return float("inf")


async def _ask_grpc_once(server: ServerProcess) -> str:
    async with grpc.aio.insecure_channel(server.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        return await _call(channel)


async def _ask_rest_once(server: ServerProcess) -> str:
    async with httpx.AsyncClient(base_url=server.http_url, timeout=5) as client:
        return await _post(client)


async def _ask_until_gone(server: ServerProcess, number: int) -> Counter[str]:
    said: Counter[str] = Counter()
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(server.grpc, options=options) as channel,
        httpx.AsyncClient(base_url=server.http_url, timeout=30) as client,
    ):
        is_new = True  # the connection of the next request
        while not said[GONE]:
            what = await (_call(channel) if number % 2 else _post(client))
            said[UNACCEPTED if what == RESET and is_new else what] += 1
            is_new = what != "OK"
    return said


async def _call(channel: grpc.aio.Channel) -> str:
    message = make_infer_request(NOOP, ("x", "FP32", (1, 256), np.zeros(256, np.float32).tobytes()))
    try:
        await channel.unary_unary(INFER)(message.SerializeToString(), timeout=30)
    except grpc.aio.AioRpcError as error:
        is_gone = "onnection refused" in (error.details() or "") or "failed to connect" in (error.details() or "")
        return GONE if is_gone else f"{error.code().name}: {error.details()}"
    return "OK"


async def _post(client: httpx.AsyncClient) -> str:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 256], "data": [0.0] * 256}
    try:
        answer = await client.post(f"/v2/models/{NOOP}/infer", json={"inputs": [tensor]})
    except httpx.ConnectError:
        return GONE
    except (httpx.ReadError, httpx.WriteError):
        return RESET
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    if answer.status_code == 200 and answer.headers.get("connection") == "close":
        return LEFT
    return "OK" if answer.status_code == 200 else f"{answer.status_code}: {answer.text[:100]}"
