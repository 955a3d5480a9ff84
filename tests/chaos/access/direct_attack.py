"""Attack a worker's direct endpoint, and measure the effect on clients whose requests this worker serves."""

from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import replace
from functools import partial

import grpc

from penstock.pb.v1.access_pb2 import DiscoverRequest
from penstock.pb.v1.access_pb2_grpc import DirectStub
from tests.chaos.attack import beyond, costly, decoding, descriptors, header_bombs, parameters, unread, waiting
from tests.chaos.attack.run import attack_all
from tests.chaos.attack.strike import Attack, Scene
from tests.chaos.report import ChaosPlan, Result

# Attacks over gRPC without ordered sessions, which a worker's endpoint does not support.
NAMES = (
    "1 numbers over 63 bits",
    "2 four million parameters, a million empty inputs",
    "2 typed contents of fifty megabytes",
    "2 streams, health and reflection",
    "4 flood of calls",
    "4 unread answers on a gRPC stream",
    "4 unread answers of gRPC calls",
    "4 half-sent gRPC messages",
    "beyond: a method whose name is no text",
    *(f"6 header bomb of {size}" for size in header_bombs.BOMBS),
    "7 idle connections to grpcio",
)
OF_GRPC = (parameters, decoding, waiting, unread, beyond, header_bombs, descriptors)
ATTACKS = tuple(attack for of in OF_GRPC for attack in of.ATTACKS if attack.name in NAMES) + costly.ATTACKS


async def run(plan: ChaosPlan) -> Result:
    found = await attack_all(plan, [_aim_at_worker(attack) for attack in ATTACKS])
    result = Result(details=found.details)
    for bar in found.bars:
        result.must(f"direct_{bar.figure}", found.figures[bar.figure], bar.low, bar.high)
    return result


def _aim_at_worker(attack: Attack) -> Attack:
    return replace(attack, name=f"direct: {attack.name}", strike=partial(_strike_endpoint, attack.strike))


async def _strike_endpoint(strike: Callable[[Scene], Awaitable[None]], scene: Scene) -> None:
    async with grpc.aio.insecure_channel(scene.server.grpc) as channel:
        way = await DirectStub(channel).Discover(DiscoverRequest(model="minilm"), timeout=30)
    server = copy(scene.server)
    server.grpc = way.address
    await strike(replace(scene, server=server))
