"""Clients that send as fast as allowed, and read one answer per second or none: the server's memory must not grow."""

import asyncio
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.repository import write_model
from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from tests.chaos.checked_load import CheckedLoad, EchoQuestion
from tests.chaos.report import ChaosPlan, Result
from tests.chaos.repository import add_any_size_model, add_echo
from tests.chaos.streams import FRAMES, TICKS, GrpcStream, StreamTally, WebSocketStream

SLOW_S = 1.0  # between two answers that are read
SAMPLE_S = 2.5
# The model, and the pause before each answer is read; None: nothing is read.
CASES: dict[str, tuple[str, float | None]] = {
    "slow": (FRAMES, SLOW_S),
    "stopped": (FRAMES, None),
    "decoupled_slow": (TICKS, SLOW_S),
}
_TICKS = b"""
import numpy as np


class Model:
    def infer(self, inputs, context):
        for number in range(int(inputs["count"][0])):
            yield {"tick": np.full(8192, number, np.int64)}
"""
_TICKS_SETTINGS: dict[str, Any] = {
    "task": "tensor",
    "engine": "python",
    "timeouts": {"request_s": 3600},
    "instances": {"count": 2},  # a decoupled request occupies an instance while it runs
    "python": {
        "inputs": [{"name": "count", "datatype": "INT64", "shape": [1]}],
        "outputs": [{"name": "tick", "datatype": "INT64", "shape": [-1]}],
        "is_decoupled": True,
    },
}


async def run(plan: ChaosPlan) -> Result:
    add_models(plan.folder / "models")
    settle_s, seconds = (5.0, 15.0) if plan.is_quick else (10.0, 60.0)
    with ServerProcess(plan.folder / "models", plan.folder / "slow-reader") as server:
        await server.wait_all_workers()
        return await read_slowly(server, settle_s, seconds, plan)


def add_models(repository: Path) -> None:
    add_echo(repository)
    add_any_size_model(repository)
    write_model(repository / TICKS, "model.py", _TICKS, **_TICKS_SETTINGS)


async def read_slowly(server: ServerProcess, settle_s: float, seconds: float, plan: ChaosPlan) -> Result:
    """Run slow readers for `seconds`, of which the first `settle_s` fill buffers, beside normal callers."""
    streams: dict[str, GrpcStream | WebSocketStream] = {}
    for name, (model, pause_s) in CASES.items():
        streams[f"grpc_{name}"] = GrpcStream(server.grpc, model, pause_s)
        streams[f"websocket_{name}"] = WebSocketStream(server.http, model, pause_s)
    memory: list[int] = []
    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(stream.run()) for stream in streams.values()]
        async with CheckedLoad(server.grpc, [EchoQuestion()], callers=4, pause_s=0.1) as neighbours:
            await asyncio.sleep(settle_s)
            settled = server.rss_bytes()
            for _ in range(max(1, round((seconds - settle_s) / SAMPLE_S))):
                await asyncio.sleep(SAMPLE_S)
                memory.append(server.rss_bytes())
                plan.say(f"{memory[-1] / 2**20:.1f} MiB, {settled / 2**20:.1f} MiB at first")
        for reader in readers:
            reader.cancel()
    seen = {name: stream.seen for name, stream in streams.items()}
    result = _judge(seen, memory[-1] / settled - 1)
    result.must("slow_reader_neighbours_failed", neighbours.tally.failed, high=0)
    result.must("slow_reader_left_inside", await _count_in_flight(server), high=0)
    result.details["rss_mib"] = [round(size / 2**20, 1) for size in (settled, *memory)]
    result.details["neighbours"] = neighbours.tally.details()
    return result


def _judge(seen: dict[str, StreamTally], growth: float) -> Result:
    result = Result()
    result.must("slow_reader_rss_growth", growth, high=0.02)
    result.must("slow_reader_wrong", sum(found.wrong for found in seen.values()), high=0)
    result.must("slow_reader_broken", sum(bool(found.failure) for found in seen.values()), high=0)
    # Check that slow readers got answers, because a server that answers nothing would not grow, either.
    slow = [found.received for name, found in seen.items() if name.endswith("slow")]
    result.must("slow_reader_least_received", min(slow), low=1)
    result.details = {name: asdict(found) for name, found in seen.items()}
    return result


async def _count_in_flight(server: ServerProcess) -> float:
    """Return how many requests are in flight within 10 s after all clients have disconnected."""
    with suppress(TimeoutError):
        await until_seen(lambda: not server.status()["inflight_requests"], "all have left", 10)
    return float(server.status()["inflight_requests"])
