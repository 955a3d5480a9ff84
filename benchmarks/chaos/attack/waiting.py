"""Requests that wait for others which never come: they must not fill the server for those that wait for nothing."""

import asyncio
from collections import Counter

import grpc

from benchmarks.chaos.attack.strike import Attack, Scene
from benchmarks.chaos.checked_load import EchoQuestion
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub

REQUESTS = 12_000  # more than limits.max_inflight_requests
CHANNELS = 4
HOLD_S = 15.0
TOGETHER, PAUSE_S = 100, 0.1  # it fills the server slowly: a flood is another attack


async def _never_first(scene: Scene) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(scene.server.grpc, options=options) for _ in range(CHANNELS)]
    calls = [GRPCInferenceServiceStub(channel).ModelInfer for channel in channels]
    codes: Counter[str] = Counter()

    async def wait(number: int) -> None:
        message = EchoQuestion().ask(number)
        message.parameters["session_id"].string_param = f"never-{number // 60}"
        message.parameters["seq_no"].int64_param = 2 + number % 60
        try:
            await calls[number % CHANNELS](message, timeout=HOLD_S)
        except grpc.aio.AioRpcError as error:
            codes[error.code().name] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(REQUESTS):
            group.create_task(wait(number))
            if number % TOGETHER == 0:
                await asyncio.sleep(PAUSE_S)
    for channel in channels:
        await channel.close()
    scene.must(codes["RESOURCE_EXHAUSTED"] or codes["UNAVAILABLE"], f"all may wait: {dict(codes)}")
    scene.must(not codes["INTERNAL"] and not codes["UNKNOWN"], f"answered {dict(codes)}")


ATTACKS = (Attack("5 waiting for a seq_no that never comes", _never_first),)
