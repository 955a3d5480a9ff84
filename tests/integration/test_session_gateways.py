"""Ordered sessions over two gateways of one server, with their records in Redis, while gateways are killed."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from benchmarks.server import ServerProcess
from benchmarks.valkey import Valkey
from benchmarks.waiting import until_seen
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import ROOT, answered, floats, write_identity, write_slow

WAIT_S = 60.0
PAUSE_S = 0.05
CONNECTIONS = 8  # the kernel assigns each to one of the gateways
SESSIONS = 40
COUNTER = "session_counter"  # keeps state: the numbers that it has seen of each session
ROUNDS = 500.0  # of the slow model: about a quarter of a second
AGAIN = ("session_moved", "gateway_lost", "unavailable", "draining", "deadline_exceeded", "model_not_ready")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("gateways")
    write_identity(folder / "models", "echo", "FP32")
    shutil.copytree(ROOT / "tests/data/python_models" / COUNTER, folder / "models" / COUNTER)
    write_slow(folder / "models", "slow", "batching: {max_rows: 1}\ninstances: {count: 1}\n")
    with Valkey(folder / "valkey") as valkey:
        settings = {"sessions": {"url": valkey.url}}
        with ServerProcess(folder / "models", folder, "--gateways", "2", settings=settings) as running:
            yield running


@pytest.fixture
async def stubs(server: ServerProcess) -> AsyncIterator[list[Any]]:
    """Return stubs with one connection each."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(server.grpc, options=options) for _ in range(CONNECTIONS)]
    yield [GRPCInferenceServiceStub(channel) for channel in channels]
    for channel in channels:
        await channel.close()


def step(session: str, seq_no: int, model: str = "echo", number: float = 0.0) -> pb.ModelInferRequest:
    message = floats(model, number or float(seq_no), request_id=f"{session}-{seq_no}")
    message.parameters["session_id"].string_param = session
    message.parameters["seq_no"].int64_param = seq_no
    return message


def place(answer: pb.ModelInferResponse) -> int:
    return int(answer.parameters["session_step"].int64_param)


def is_repeat(answer: pb.ModelInferResponse) -> bool:
    return bool(answer.parameters["session_repeat"].bool_param)


async def insist(stubs: list[Any], message: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """Send the request again over other connections, like a client that wants its answer."""
    for attempt in range(int(WAIT_S / PAUSE_S)):
        stub = stubs[(hash(message.id) + attempt) % len(stubs)]
        try:
            answer: pb.ModelInferResponse = await stub.ModelInfer(message, timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            code = dict(error.trailing_metadata() or ()).get("penstock-code", "")
            if code not in AGAIN and error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(PAUSE_S)
            continue
        return answer
    raise AssertionError(f"{message.id} was never answered")


async def play(stubs: list[Any], name: str) -> None:
    """Send each step over another connection, out of order and some twice."""
    sent = [(f"{name}-{n}", seq_no) for n in range(SESSIONS) for seq_no in (3, 1, 2, 4, 2)]
    answers = await asyncio.gather(
        *(stubs[i % CONNECTIONS].ModelInfer(step(*each), timeout=WAIT_S) for i, each in enumerate(sent))
    )
    for (_, seq_no), answer in zip(sent, answers, strict=True):
        assert (place(answer), answered(answer)) == (seq_no, [float(seq_no)])


async def test_the_steps_of_a_session_may_come_to_any_gateway(server: ServerProcess, stubs: list[Any]) -> None:
    for attempt in range(int(WAIT_S)):
        await play(stubs, f"any-{attempt}")
        await asyncio.sleep(0.5)  # until the gateway is counted; the second gateway may start slowly
        if await asyncio.to_thread(server.metric, "penstock_session_forwarded") > 0:
            break
    else:
        raise AssertionError("nothing went from gateway to gateway")
    again = await asyncio.gather(*(stub.ModelInfer(step("any-0-0", 2), timeout=WAIT_S) for stub in stubs))
    assert all(is_repeat(answer) for answer in again)


async def test_a_killed_gateway_loses_no_session(server: ServerProcess, stubs: list[Any]) -> None:
    names = [f"mortal-{n}" for n in range(SESSIONS)]
    for seq_no in (1, 2):
        await asyncio.gather(*(insist(stubs, step(name, seq_no)) for name in names))
    fourth = [asyncio.create_task(insist(stubs, step(name, 4))) for name in names]
    await until_seen(lambda: server.metric("penstock_session_waiting") == SESSIONS, "they wait for the third")
    gateways = server.children("gateway")
    os.kill(gateways["gateway-0"], signal.SIGKILL)
    third = await asyncio.gather(*(insist(stubs, step(name, 3)) for name in names))
    assert [place(answer) for answer in third] == [3] * SESSIONS
    assert [place(answer) for answer in await asyncio.gather(*fourth)] == [4] * SESSIONS
    again = await asyncio.gather(*(insist(stubs, step(name, 2)) for name in names))
    assert all(is_repeat(answer) and place(answer) == 2 for answer in again)
    await until_seen(lambda: len(server.children("gateway")) == 2, "it is back", WAIT_S)
    fifth = await asyncio.gather(*(insist(stubs, step(name, 5)) for name in names))
    assert [place(answer) for answer in fifth] == [5] * SESSIONS
    assert not server.tracebacks()


async def test_a_stateful_model_keeps_its_state_over_gateways(server: ServerProcess, stubs: list[Any]) -> None:
    def count(session: str, seq_no: int) -> pb.ModelInferRequest:
        message = step(session, seq_no, COUNTER)
        message.inputs[0].CopyFrom(pb.ModelInferRequest.InferInputTensor(name="INPUT", datatype="INT32", shape=(1,)))
        message.raw_input_contents[0] = np.array([seq_no], np.int32).tobytes()
        return message

    for seq_no in range(1, 5):
        if seq_no == 3:
            os.kill(server.children("gateway")["gateway-0"], signal.SIGKILL)
        for name in ("counted-0", "counted-1", "counted-2", "counted-3"):
            answer = await insist(stubs, count(name, seq_no))
            found = {output.name: raw for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)}
            assert np.frombuffer(found["SEEN"], np.int64).tolist() == list(range(1, seq_no + 1))
    await until_seen(lambda: len(server.children("gateway")) == 2, "it is back", WAIT_S)


async def test_a_step_running_when_its_gateway_is_killed_runs_once(server: ServerProcess, stubs: list[Any]) -> None:
    async def runs() -> int:
        for stub in stubs:
            try:
                found = await stub.ModelStatistics(pb.ModelStatisticsRequest(name="slow"), timeout=WAIT_S)
            except grpc.aio.AioRpcError:  # the connection to the killed gateway
                continue
            return int(found.model_stats[0].inference_count)
        raise AssertionError("no gateway answers")

    before = await runs()
    names = [f"slow-{n}" for n in range(6)]
    running = [asyncio.create_task(insist(stubs, step(name, 1, "slow", ROUNDS))) for name in names]
    await until_seen(lambda: server.metric("penstock_inflight_requests") >= len(names), "they are inside")
    await asyncio.sleep(0.3)
    os.kill(server.children("gateway")["gateway-1"], signal.SIGKILL)
    answers = await asyncio.gather(*running)
    assert [place(answer) for answer in answers] == [1] * len(names)
    await until_seen(lambda: len(server.children("gateway")) == 2, "it is back", WAIT_S)
    assert await runs() - before == len(names)
