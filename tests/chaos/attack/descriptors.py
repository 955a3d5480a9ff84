"""Thousands of idle connections, which use up file descriptors: the server must survive and report its readiness."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.waiting import until_seen
from tests.chaos.attack.header_bombs import GRPCIO, MANAGER, MANAGER_PORT
from tests.chaos.attack.strike import Attack, Scene

CONNECTIONS = 8000
TOGETHER = 400
HOLD_S = 3.0
RECOVERY_S = 20.0


async def _open_idle_connections(scene: Scene, get_port: Callable[[Scene], int]) -> None:
    loop, opened = asyncio.get_running_loop(), []

    async def connect() -> None:
        one = socket.socket()
        one.setblocking(False)
        opened.append(one)
        try:
            async with asyncio.timeout(HOLD_S):
                await loop.sock_connect(one, ("127.0.0.1", get_port(scene)))
        except OSError:
            pass  # the server refuses it, or its backlog is full

    try:
        for _ in range(CONNECTIONS // TOGETHER):
            await asyncio.gather(*(connect() for _ in range(TOGETHER)))
        await asyncio.sleep(HOLD_S)
    finally:
        for one in opened:
            one.close()
    await until_seen(lambda: _is_healthy(scene, get_port(scene)), "health is served again", RECOVERY_S)
    failures = scene.server.metric("penstock_background_failures")
    scene.say(f"{failures:.0f} passes of background loops failed")


def _is_healthy(scene: Scene, port: int) -> bool:
    """Return whether the server is ready over HTTP and over gRPC at the same time."""
    try:
        over_http = httpx.get(f"{scene.server.http_url}/v2/health/ready", timeout=5).status_code == 200
        targets = {scene.server.grpc, f"127.0.0.1:{port}"} - {scene.server.http}
        return over_http and all(_is_serving(target) for target in targets)
    except (httpx.HTTPError, grpc.RpcError):
        return False


def _is_serving(target: str) -> bool:
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _get_grpc_port(scene: Scene) -> int:
    return scene.server.grpc_port


def _get_http_port(scene: Scene) -> int:
    return scene.server.http_port


def _get_manager_port(scene: Scene) -> int:
    return MANAGER_PORT


ATTACKS = (
    Attack("7 idle connections to the native listener", partial(_open_idle_connections, get_port=_get_grpc_port)),
    Attack("7 idle connections to HTTP", partial(_open_idle_connections, get_port=_get_http_port)),
    Attack("7 idle connections to grpcio", partial(_open_idle_connections, get_port=_get_grpc_port), settings=GRPCIO),
    Attack(
        "7 idle connections to the manager",
        partial(_open_idle_connections, get_port=_get_manager_port),
        settings=MANAGER,
    ),
)
