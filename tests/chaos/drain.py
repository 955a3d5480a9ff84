"""Send SIGTERM to the server: it must answer accepted requests, refuse new ones, and exit with status 0."""

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import grpc

from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from penstock.experiments.load.drivers import INFER
from penstock.experiments.load.payloads import build_built_in_payloads
from tests.chaos.calls import get_status_name
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import add_shipped

IN_FLIGHT = 16


async def run(plan: ChaosPlan) -> Result:
    repository = plan.folder / "models"
    add_shipped(repository, plan.models, "srcnn")
    with ServerProcess(repository, plan.folder / "drain") as server:
        await server.wait_all_workers()
        found = await drain_server(server)
    result = Result(details=found)
    result.must("drain_failed", IN_FLIGHT - found["inside"].get("OK", 0), high=0)
    result.must("drain_wrong_refusals", sum(found["came_later"].values()) - found["came_later"]["UNAVAILABLE"], high=0)
    result.must("drain_exit_code", found["exit_code"], low=0, high=0)
    return result


async def drain_server(server: ServerProcess) -> dict[str, Any]:
    """Send SIGTERM while photographs are upscaled; return the outcomes of these and of later requests."""
    photos = [photo.grpc() for photo in build_built_in_payloads("photos", "srcnn")]
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(INFER)
        inside = [
            asyncio.create_task(get_status_name(call(photos[n % len(photos)], timeout=60))) for n in range(IN_FLIGHT)
        ]
        await until_seen(lambda: server.status()["inflight_requests"] >= IN_FLIGHT, "all are inside")
        os.kill(server.pid, signal.SIGTERM)
        await asyncio.sleep(0.1)
        later: Counter[str] = Counter(UNAVAILABLE=0)
        while not all(task.done() for task in inside):
            later[await get_status_name(call(photos[0], timeout=30))] += 1
            await asyncio.sleep(0.05)
        codes = Counter([await task for task in inside])
        exit_code = await asyncio.to_thread(server.process.wait, 60)
        later[await get_status_name(call(photos[0], timeout=30))] += 1
    return {"inside": dict(codes), "came_later": dict(later), "exit_code": exit_code}
