"""Roll out versions that fail or are three times slower: the server must roll them back soon, by itself.

One server with two gateways gets 200 requests per second, on a fixed schedule that does not wait for answers. Clients
count the answers and failures of the new version.

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
from tests.chaos.calls import make_infer_request
from tests.chaos.report import ChaosPlan, Result

MODEL = "canary"
RATE = 200.0
WORK_S = 0.01  # processing time of the old version
CHANNELS = 4  # so that both gateways are used
WARM_UP_S, MAX_ROLLOUT_S, AFTER_S = 3.0, 60.0, 2.0
DEADLINE_S = 20.0
FLAGS = ("--gateways", "2")
WORK: Mapping[str, str] = {
    "old": f"time.sleep({WORK_S})",
    "fails": "raise RuntimeError('it was trained on something else')",
    "slow": f"time.sleep({3 * WORK_S})",
}
CODE = """import time


class Model:
    def infer(self, inputs, context):
        {work}
        return {{"Y": inputs["X"]}}
"""
END_STATES = ("done", "rolled back", "undone", "failed")


@dataclass(slots=True)
class CanaryAnswers:
    """Clients' answers by version; failures belong to version 2, because version 1 does not fail."""

    answers: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, list[float]] = field(default_factory=dict)

    def count_canary_requests(self) -> int:
        return self.answers["2"] + self.failures.total()


async def run(plan: ChaosPlan) -> Result:
    result = Result()
    worst = 0
    for behaviour in ("fails", "slow"):
        folder = plan.folder / f"canary-{behaviour}"
        add_version(folder / "models", 1, "old")
        with ServerProcess(folder / "models", folder / "server", *FLAGS) as server:
            answers, status = await roll_out(server, folder / "models", behaviour, RATE)
        plan.say(f"{behaviour}: {status.phase} after {answers.count_canary_requests()} answers: {status.reason}")
        worst = max(worst, answers.count_canary_requests())
        result.must(f"canary_{behaviour}_rolled_back", float(status.phase == "rolled back"), low=1)
        result.must(f"canary_{behaviour}_late_answers", answers.failures["after"], high=0)
        result.details[behaviour] = {
            "phase": status.phase,
            "reason": status.reason,
            "answers": dict(answers.answers),
            "failures": dict(answers.failures),
            "p50_ms": {each: round(1000 * float(np.median(found)), 1) for each, found in answers.latencies.items()},
        }
    result.must("canary_answers", worst, high=100)
    return result


def add_version(repository: Path, version: int, behaviour: str) -> None:
    settings = python_settings("X", "Y", "FP32", [-1], instances={"count": 8})
    write_version(repository / MODEL, version, "model.py", CODE.format(work=WORK[behaviour]).encode(), **settings)


async def roll_out(
    server: ServerProcess, repository: Path, behaviour: str, rate: float, **plan: Any
) -> tuple[CanaryAnswers, cluster_pb2.RolloutStatus]:
    """Roll out version 2 under load; wait until the rollout has ended, and a few seconds longer."""
    await server.wait_all_workers()
    add_version(repository, 2, behaviour)
    answers = CanaryAnswers()
    async with grpc.aio.insecure_channel(server.manager()) as channel:
        rollouts: Any = RolloutsStub(channel)
        asking = asyncio.create_task(ask_forever(server.grpc, rate, answers))
        try:
            await asyncio.sleep(WARM_UP_S)
            asked = json.dumps({"name": MODEL, "new": "2", "hold_s": 10, **plan})
            answer = await rollouts.StartRollout(cluster_pb2.StartRolloutRequest(plan=asked), timeout=DEADLINE_S)
            if answer.HasField("failure"):
                raise AssertionError(answer.failure.message)
            status = await _wait_until_over(rollouts)
            before = answers.count_canary_requests()
            await asyncio.sleep(AFTER_S)
            answers.failures["after"] += max(0, answers.count_canary_requests() - before - int(rate * 0.2))
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    return answers, status


async def _wait_until_over(rollouts: Any) -> cluster_pb2.RolloutStatus:
    end = time.monotonic() + MAX_ROLLOUT_S
    while True:
        listed = await rollouts.ListRollouts(cluster_pb2.ListRolloutsRequest(name=MODEL), timeout=DEADLINE_S)
        status: cluster_pb2.RolloutStatus = listed.rollouts[0]
        if status.phase in END_STATES or time.monotonic() > end:
            return status
        await asyncio.sleep(0.1)


async def ask_forever(address: str, rate: float, answers: CanaryAnswers) -> None:
    """Send requests on a fixed schedule, without waiting for answers."""
    channels = [
        grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) for _ in range(CHANNELS)
    ]
    stubs: list[Any] = [GRPCInferenceServiceStub(channel) for channel in channels]
    message = make_infer_request(MODEL, ("X", "FP32", (4,), bytes(16)))
    asked: set[asyncio.Task[None]] = set()
    begun, number = time.monotonic(), 0
    try:
        while True:
            task = asyncio.create_task(_ask(stubs[number % CHANNELS], message, answers))
            asked.add(task)
            task.add_done_callback(asked.discard)
            number += 1
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
    finally:
        await asyncio.gather(*asked, return_exceptions=True)
        for channel in channels:
            await channel.close()


async def _ask(stub: Any, message: pb.ModelInferRequest, answers: CanaryAnswers) -> None:
    started = time.monotonic()
    try:
        answer = await stub.ModelInfer(message, timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        answers.failures[f"{error.code().name}: {error.details()}"[:200]] += 1
        return
    answers.answers[answer.model_version] += 1
    answers.latencies.setdefault(answer.model_version, []).append(time.monotonic() - started)
