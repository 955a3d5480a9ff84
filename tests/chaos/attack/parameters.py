"""Request parameters that cannot be encoded for a worker: the server must refuse them, and continue to serve."""

import asyncio

import grpc

from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.attack.strike import Attack, Scene
from tests.chaos.calls import get_status_name
from tests.chaos.checked_load import EchoQuestion

CALLS = 128


async def _send_large_numbers(scene: Scene) -> None:
    async with grpc.aio.insecure_channel(scene.server.grpc) as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer

        async def ask(number: int) -> str:
            message = EchoQuestion().ask(number)
            message.parameters["large"].uint64_param = 2**63 + number
            return await get_status_name(call(message, timeout=10))

        codes = set(await asyncio.gather(*(ask(number) for number in range(CALLS))))
    scene.must(codes == {"INVALID_ARGUMENT"}, f"answered {sorted(codes)}")


ATTACKS = (Attack("1 numbers over 63 bits", _send_large_numbers),)
