"""Requests that wait for session steps that never arrive, and floods of requests: other callers must be served."""

import asyncio
from collections import Counter

import grpc

from penstock.core.tensors import pack_bytes
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.attack.strike import Attack, Scene
from tests.chaos.calls import get_status_name, make_infer_request
from tests.chaos.checked_load import EchoQuestion
from tests.chaos.repository import ANY_SIZE_MODEL

REQUESTS = 12_000  # more than limits.max_inflight_requests
CHANNELS = 4
FLOOD = 3000
HOLD_S = 15.0
TOGETHER, PAUSE_S = 100, 0.1  # it fills the server slowly: a flood is a different attack


async def _omit_first_steps(scene: Scene) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(scene.server.grpc, options=options) for _ in range(CHANNELS)]
    calls = [GRPCInferenceServiceStub(channel).ModelInfer for channel in channels]
    codes: Counter[str] = Counter()

    async def wait(number: int) -> None:
        message = EchoQuestion().ask(number)
        message.parameters["session_id"].string_param = f"never-{number // 60}"
        message.parameters["seq_no"].int64_param = 2 + number % 60
        codes[await get_status_name(calls[number % CHANNELS](message, timeout=HOLD_S))] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(REQUESTS):
            group.create_task(wait(number))
            if number % TOGETHER == 0:
                await asyncio.sleep(PAUSE_S)
    for channel in channels:
        await channel.close()
    scene.must(codes["RESOURCE_EXHAUSTED"] or codes["UNAVAILABLE"], f"all may wait: {dict(codes)}")
    scene.must(not codes["INTERNAL"] and not codes["UNKNOWN"], f"answered {dict(codes)}")


async def _flood_server(scene: Scene) -> None:
    """Send more concurrent calls than a server accepts. They must wait, and no other call may be dropped."""
    message = make_infer_request(
        ANY_SIZE_MODEL, ("n", "INT64", (1, 1), bytes(8)), ("s", "BYTES", (1, 1), pack_bytes(["x"]))
    )
    async with grpc.aio.insecure_channel(scene.server.grpc) as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer

        codes = Counter(await asyncio.gather(*(get_status_name(call(message, timeout=30)) for _ in range(FLOOD))))
    scene.must(set(codes) <= {"OK", "RESOURCE_EXHAUSTED"}, f"answered {dict(codes)}")


ATTACKS = (
    Attack("4 flood of calls", _flood_server),
    Attack("5 waiting for a seq_no that never comes", _omit_first_steps),
)
