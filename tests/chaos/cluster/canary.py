"""Canaries that fail, and that are three times slower, under 200 requests a second: rolled back by themselves, soon.

One server with two gateways. Callers send on a fixed schedule, whatever becomes of earlier requests. What the new
version answers, well or badly, is counted where it arrives.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.repository import python_settings, write_version
from benchmarks.server import ServerProcess
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.pb.v1 import cluster_pb2
from penstock.pb.v1.cluster_pb2_grpc import RolloutsStub
from tests.chaos.calls import infer_request
from tests.chaos.report import ChaosPlan, Result

MODEL = "canary"
RATE = 200.0
SECONDS_S = 0.01  # of the old version's work
CHANNELS = 4  # so that both gateways are used
WARM_UP_S, LONGEST_S, AFTER_S = 3.0, 60.0, 2.0
DEADLINE_S = 20.0
FLAGS = ("--gateways", "2")
WORK: Mapping[str, str] = {
    "old": f"time.sleep({SECONDS_S})",
    "fails": "raise RuntimeError('it was trained on something else')",
    "slow": f"time.sleep({3 * SECONDS_S})",
}
CODE = """import time


class Model:
    def infer(self, inputs, context):
        {work}
        return {{"Y": inputs["X"]}}
"""
OVER = ("done", "rolled back", "undone", "failed")


@dataclass(slots=True)
class Heard:
    """Clients' answers by version; failures belong to version 2, because version 1 does not fail."""

    answers: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, list[float]] = field(default_factory=dict)

    def of_canary(self) -> int:
        return self.answers["2"] + self.failures.total()


async def run(plan: ChaosPlan) -> Result:
    result = Result()
    worst = 0
    for what in ("fails", "slow"):
        folder = plan.folder / f"canary-{what}"
        add_version(folder / "models", 1, "old")
        with ServerProcess(folder / "models", folder / "server", *FLAGS) as server:
            heard, status = await roll_out(server, folder / "models", what, RATE)
        plan.say(f"{what}: {status.phase} after {heard.of_canary()} answers: {status.reason}")
        worst = max(worst, heard.of_canary())
        result.must(f"canary_{what}_rolled_back", float(status.phase == "rolled back"), low=1)
        result.must(f"canary_{what}_late_answers", heard.failures["after"], high=0)
        result.details[what] = {
            "phase": status.phase,
            "reason": status.reason,
            "answers": dict(heard.answers),
            "failures": dict(heard.failures),
            "p50_ms": {each: round(1000 * float(np.median(found)), 1) for each, found in heard.latencies.items()},
        }
    result.must("canary_answers", worst, high=100)
    return result


def add_version(repository: Path, version: int, what: str) -> None:
    settings = python_settings("X", "Y", "FP32", [-1], instances={"count": 8})
    write_version(repository / MODEL, version, "model.py", CODE.format(work=WORK[what]).encode(), **settings)


async def roll_out(
    server: ServerProcess, repository: Path, what: str, rate: float, **plan: Any
) -> tuple[Heard, cluster_pb2.RolloutStatus]:
    """Roll out under load until the rollout is over, and a little longer."""
    await server.wait_all_workers()
    add_version(repository, 2, what)
    heard = Heard()
    async with grpc.aio.insecure_channel(server.manager()) as channel:
        rollouts: Any = RolloutsStub(channel)
        asking = asyncio.create_task(ask_forever(server.grpc, rate, heard))
        try:
            await asyncio.sleep(WARM_UP_S)
            asked = json.dumps({"name": MODEL, "new": "2", "hold_s": 10, **plan})
            answer = await rollouts.StartRollout(cluster_pb2.StartRolloutRequest(plan=asked), timeout=DEADLINE_S)
            if answer.HasField("failure"):
                raise AssertionError(answer.failure.message)
            status = await _until_over(rollouts)
            before = heard.of_canary()
            await asyncio.sleep(AFTER_S)
            heard.failures["after"] += max(0, heard.of_canary() - before - int(rate * 0.2))
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    return heard, status


async def _until_over(rollouts: Any) -> cluster_pb2.RolloutStatus:
    end = time.monotonic() + LONGEST_S
    while True:
        listed = await rollouts.ListRollouts(cluster_pb2.ListRolloutsRequest(name=MODEL), timeout=DEADLINE_S)
        status: cluster_pb2.RolloutStatus = listed.rollouts[0]
        if status.phase in OVER or time.monotonic() > end:
            return status
        await asyncio.sleep(0.1)


async def ask_forever(address: str, rate: float, heard: Heard) -> None:
    """Send on a fixed schedule."""
    channels = [
        grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) for _ in range(CHANNELS)
    ]
    stubs: list[Any] = [GRPCInferenceServiceStub(channel) for channel in channels]
    message = infer_request(MODEL, ("X", "FP32", (4,), bytes(16)))
    asked: set[asyncio.Task[None]] = set()
    begun, number = time.monotonic(), 0
    try:
        while True:
            task = asyncio.create_task(_ask(stubs[number % CHANNELS], message, heard))
            asked.add(task)
            task.add_done_callback(asked.discard)
            number += 1
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
    finally:
        await asyncio.gather(*asked, return_exceptions=True)
        for channel in channels:
            await channel.close()


async def _ask(stub: Any, message: pb.ModelInferRequest, heard: Heard) -> None:
    started = time.monotonic()
    try:
        answer = await stub.ModelInfer(message, timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        heard.failures[f"{error.code().name}: {error.details()}"[:200]] += 1
        return
    heard.answers[answer.model_version] += 1
    heard.latencies.setdefault(answer.model_version, []).append(time.monotonic() - started)
