"""Limits on partial gRPC messages, and on answers that clients do not read."""

import asyncio
import socket
from typing import Any, cast

import grpc
import pytest

from penstock.core.config import Limits
from penstock.core.errors import Overloaded, TooSlow
from penstock.core.principals import ANYBODY
from penstock.endpoints.grpc.grpc_traffic import FEW, SLOW_S, GrpcTraffic
from penstock.gateway.oip.grpc_service import wrap_with_message
from penstock.serving.admission import Admission
from penstock.wire.grpc_listener.header_memory import CALL_BYTES, FRAME_BYTES

WAIT_S = 10.0
MIB = 1024 * 1024
GROWN = 2**40


class Caller:
    """A call whose message arrives when the test sends it."""

    def __init__(self, peer: str = "ipv4:127.0.0.1:1", announced_bytes: int = 0) -> None:
        self._peer = peer
        self._metadata = [("x-penstock-message-bytes", str(announced_bytes))] if announced_bytes else []
        self.message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.callbacks: list[Any] = []

    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    async def read(self) -> Any:
        return await self.message

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


def traffic_within(limits: Limits | None = None) -> GrpcTraffic:
    return GrpcTraffic(Admission(limits or Limits()))


def call(traffic: GrpcTraffic, caller: Caller) -> asyncio.Task[Any]:
    async def answer(message: Any, context: Any, principal: Any) -> str:
        return f"to {message}"

    async def run() -> Any:
        return await wrap_with_message(answer, traffic)(None, cast(Any, caller), ANYBODY)

    return asyncio.create_task(run())


async def next_message(traffic: GrpcTraffic, caller: Caller) -> Any:
    return await anext(traffic.messages(cast(Any, caller)))


async def test_a_call_receives_its_message() -> None:
    traffic, caller = traffic_within(), Caller()
    task = call(traffic, caller)
    await asyncio.sleep(0)
    assert len(traffic.calls) == 1
    caller.message.set_result("hello")
    assert await task == "to hello"
    assert not traffic.calls


async def test_a_call_is_cancelled_when_its_client_disconnects() -> None:
    traffic = traffic_within()
    task = call(traffic, Caller())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_message_that_takes_too_long_is_refused() -> None:
    traffic = traffic_within(Limits(message_timeout_s=300))
    task = call(traffic, Caller())
    await asyncio.sleep(0)
    traffic.check_at(0.0, 0)
    traffic.check_at(299.0, 0)
    await asyncio.sleep(0)
    assert not task.done()
    traffic.check_at(301.0, 0)
    with pytest.raises(TooSlow):
        await task


async def test_calls_of_connections_with_most_partial_messages_end_when_memory_grows() -> None:
    traffic = traffic_within()
    traffic.check_at(0.0, 0)
    others = [call(traffic, Caller(f"ipv4:127.0.0.1:{port}")) for port in range(2, 2 + FEW)]
    many = [call(traffic, Caller()) for _ in range(3 * FEW)]
    await asyncio.sleep(0)
    traffic.check_at(1.0, GROWN)
    await asyncio.sleep(0)
    assert not any(task.done() for task in many)  # they have just started
    traffic.check_at(1.0 + SLOW_S, GROWN)
    for task in many:
        with pytest.raises(Overloaded):
            await task
    assert not any(task.done() for task in others)
    for task in others:
        task.cancel()


async def test_streams_are_not_ended_for_memory_used_elsewhere() -> None:
    traffic = traffic_within()
    traffic.check_at(0.0, 0)
    idle = [call(traffic, Caller(f"ipv4:127.0.0.1:{port}")) for port in range(4 * FEW)]
    await asyncio.sleep(0)
    traffic.check_at(1.0, 0)
    for look in range(20):  # a cache has filled: its content stays whichever calls end
        traffic.check_at(2.0 + look / 10, GROWN)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    left = [task for task in idle if not task.done()]
    assert len(left) == FEW, "calls are no longer ended when that frees no memory"
    more = [call(traffic, Caller(f"ipv4:127.0.0.1:{port}")) for port in range(4 * FEW)]
    await asyncio.sleep(0)
    for look in range(20):
        traffic.check_at(5.0 + look / 10, GROWN)
        await asyncio.sleep(0)
    assert not any(task.done() for task in (*left, *more))
    for task in idle + more:
        task.cancel()
    await asyncio.gather(*idle, *more, return_exceptions=True)


async def test_many_small_partial_messages_are_not_ended() -> None:
    traffic = traffic_within()
    many = [call(traffic, Caller()) for _ in range(100)]
    await asyncio.sleep(0)
    for second in range(100):
        traffic.check_at(second, 1000)
    await asyncio.sleep(0)
    assert not any(task.done() for task in many)
    for task in many:
        task.cancel()


async def test_a_stream_may_wait_without_limit_but_ends_when_memory_grows() -> None:
    traffic = traffic_within()
    traffic.check_at(0.0, 0)
    callers = [Caller() for _ in range(FEW + 1)]
    tasks = [asyncio.create_task(next_message(traffic, caller)) for caller in callers]
    await asyncio.sleep(0)
    traffic.check_at(0.0, 0)
    traffic.check_at(10_000.0, 0)
    callers[0].message.set_result("hello")
    assert await tasks[0] == "hello"
    tasks[0] = asyncio.create_task(next_message(traffic, Caller()))
    await asyncio.sleep(0)
    traffic.check_at(10_001.0, GROWN)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    ended = [task for task in tasks[1:] if task.done()]
    assert len(ended) == FEW // 2
    for task in ended:
        with pytest.raises(Overloaded):
            await task
    for task in tasks:
        task.cancel()


async def test_answers_count_until_they_are_read_or_their_connection_is_closed() -> None:
    admission = Admission(Limits())
    traffic = GrpcTraffic(admission)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as peer:
        accepted, (address, port) = listening.accept()
        caller = Caller(f"ipv4:{address}:{port}")
        context = cast(grpc.aio.ServicerContext[Any, Any], caller)
        traffic.hold_answer(context, 1000)
        assert admission.unsent.bytes == 1000
        caller.callbacks[0](context)
        assert admission.unsent.bytes == 0
        traffic.hold_answer(context, 1000)
        traffic.check_at(0.0, 0)
        traffic.check_at(1000.0, 0)
        peer.settimeout(WAIT_S)
        assert peer.recv(1) == b""
        accepted.close()


async def test_the_bytes_of_messages_are_counted_by_peer() -> None:
    traffic, caller = traffic_within(), Caller("ipv4:127.0.0.1:7")
    read = traffic.measured(lambda data: data)
    task = call(traffic, caller)
    await asyncio.sleep(0)
    caller.message.set_result(read(b"a" * 1000))
    assert await task
    assert traffic.arrived.bytes == {"ipv4:127.0.0.1:7": 1000 + CALL_BYTES}
    ended = Caller("ipv4:127.0.0.1:8")
    ended.message.set_result(grpc.aio.EOF)
    with pytest.raises(StopAsyncIteration):
        await next_message(traffic, ended)
    assert traffic.arrived.bytes["ipv4:127.0.0.1:8"] == FRAME_BYTES, "an earlier message's size is not counted again"


async def test_a_message_of_announced_size_is_read_when_there_is_room() -> None:
    traffic = GrpcTraffic(Admission(Limits(max_inflight_bytes=100 * MIB)), is_behind_edge=True)
    callers = [Caller(announced_bytes=20 * MIB) for _ in range(3)]
    tasks = [call(traffic, caller) for caller in callers]
    await asyncio.sleep(0)
    assert len(traffic.calls) == 2, "the third message would exceed the limit, so it is not read"
    traffic.measured(len)(bytes(20 * MIB))
    callers[0].message.set_result("first")
    assert await tasks[0] == "to first"
    await asyncio.sleep(0)
    assert len(traffic.calls) == 1, "the first answer has not been taken"
    for taken in callers[0].callbacks:
        taken(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(traffic.calls) == 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert traffic.transit.room.bytes == 0


async def test_no_client_announces_a_size_without_an_edge() -> None:
    traffic = GrpcTraffic(Admission(Limits(max_inflight_bytes=100 * MIB)))
    task = call(traffic, Caller(announced_bytes=1000 * MIB))
    await asyncio.sleep(0)
    assert traffic.transit.room.bytes == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_client_of_large_messages_waits_before_the_next_one_is_read() -> None:
    traffic = GrpcTraffic(Admission(Limits(max_inflight_bytes=100 * MIB)))
    first = Caller()
    read = traffic.measured(lambda data: "large")

    async def receive() -> Any:
        return read(bytes(30 * MIB))

    first.read = receive  # type: ignore[method-assign]
    assert await call(traffic, first) == "to large"
    second = call(traffic, Caller())
    await asyncio.sleep(0)
    assert not traffic.calls
    for taken in first.callbacks:
        taken(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(traffic.calls) == 1
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
