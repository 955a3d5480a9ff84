"""HTTP/2 headers that decode to many times their size, sent to gRPC listeners by callers without an API key."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.chaos.attack.strike import Attack, Scene
from tests.hpack_bomb import send_bomb

SMALL_BYTES, LARGE_BYTES = 67_000_000, 250_000_000
GRPCIO = {"gateway": {"grpc_server": "grpcio"}}
MANAGER_PORT = 22740
MANAGER = {"cluster": {"bind": f"127.0.0.1:{MANAGER_PORT}"}}
GROWTH_MIB = 300  # of one process


async def _send_header_bombs(scene: Scene, get_port: Callable[[Scene], int], size_bytes: int, padding: int = 0) -> None:
    connections = 8 if size_bytes == SMALL_BYTES else 64
    port, budget = get_port(scene), size_bytes // connections
    cut = await asyncio.gather(*(send_bomb(port, budget, padding=padding) for _ in range(connections)))
    scene.say(f"{sum(cut)} of {connections} connections were cut")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    scene.must(answer.status == health_pb2.HealthCheckResponse.SERVING, f"health is {answer.status}")


def _get_gateway_port(scene: Scene) -> int:
    return scene.server.grpc_port


def _get_manager_port(_: Scene) -> int:
    return MANAGER_PORT


BOMBS: Mapping[str, Callable[..., Awaitable[None]]] = {
    "67 MB": partial(_send_header_bombs, size_bytes=SMALL_BYTES),
    "250 MB": partial(_send_header_bombs, size_bytes=LARGE_BYTES),
    # With the padding, memory grows by less than three times the sent bytes, which hides the attack.
    "250 MB with padding": partial(_send_header_bombs, size_bytes=LARGE_BYTES, padding=5),
}
ATTACKS = tuple(
    Attack(
        f"6 header bomb of {size}{place}",
        partial(bomb, get_port=get_port),
        settings=settings,
        growth_mib=GROWTH_MIB,
    )
    for place, get_port, settings in (("", _get_gateway_port, GRPCIO), (" at the manager", _get_manager_port, MANAGER))
    for size, bomb in BOMBS.items()
)
