"""Attacks on a worker's own door: what each costs those who are routed to the same worker."""

from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import replace
from functools import partial

import grpc

from benchmarks.chaos.attack import beyond, costly, decoding, parameters, unread, waiting
from benchmarks.chaos.attack.run import attack_all
from benchmarks.chaos.attack.strike import Attack, Scene
from benchmarks.chaos.report import ChaosPlan, Result
from penstock.pb.v1.access_pb2 import DiscoverRequest
from penstock.pb.v1.access_pb2_grpc import DirectStub

# Those that come by gRPC, and are not about sessions with an order: a worker's door has none.
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
)
OF_GRPC = (parameters, decoding, waiting, unread, beyond)
ATTACKS = tuple(attack for of in OF_GRPC for attack in of.ATTACKS if attack.name in NAMES) + costly.ATTACKS


async def run(plan: ChaosPlan) -> Result:
    found = await attack_all(plan, [_aimed(attack) for attack in ATTACKS])
    result = Result(details=found.details)
    for bar in found.bars:
        result.must(f"direct_{bar.figure}", found.figures[bar.figure], bar.low, bar.high)
    return result


def _aimed(attack: Attack) -> Attack:
    return replace(attack, name=f"direct: {attack.name}", strike=partial(_at_door, attack.strike))


async def _at_door(strike: Callable[[Scene], Awaitable[None]], scene: Scene) -> None:
    async with grpc.aio.insecure_channel(scene.server.grpc) as channel:
        way = await DirectStub(channel).Discover(DiscoverRequest(model="minilm"), timeout=30)
    server = copy(scene.server)
    server.grpc = way.address
    await strike(replace(scene, server=server))
