"""Sessions against a real server, over gRPC, streams and REST."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import httpx
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import until_seen
from penstock.core.settings import Sessions
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import answered, floats, floats_json, write_identity, write_slow

WAIT_S = 60.0
LONG = 3_000.0  # rounds of the slow model: a second or two
ONE_BY_ONE = "batching: {max_rows: 1}\ninstances: {count: 1}\ntimeouts: {request_s: 600}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("sessions")
    write_identity(folder / "models", "echo", "FP32")
    write_identity(folder / "models", "brief", "FP32", "sessions: {idle_s: 0.2}\n")
    write_slow(folder / "models", "slow", ONE_BY_ONE)
    with ServerProcess(folder / "models", folder) as running:
        yield running


@pytest.fixture
async def stub(server: ServerProcess) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        yield GRPCInferenceServiceStub(channel)


@pytest.fixture
async def http(server: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.http_url, timeout=WAIT_S) as client:
        yield client


def step(
    session: str, seq_no: int | None, number: float, model: str = "echo", **more: bool | int
) -> pb.ModelInferRequest:
    message = floats(model, number, request_id=f"{session}-{seq_no}")
    message.parameters["session_id"].string_param = session
    if seq_no is not None:
        message.parameters["seq_no"].int64_param = seq_no
    for name, value in more.items():
        if isinstance(value, bool):
            message.parameters[name].bool_param = value
        else:
            message.parameters[name].int64_param = value
    return message


def place(answer: pb.ModelInferResponse) -> int:
    return int(answer.parameters["session_step"].int64_param)


def is_repeat(answer: pb.ModelInferResponse) -> bool:
    return "session_repeat" in answer.parameters and answer.parameters["session_repeat"].bool_param


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    code = dict(caught.value.trailing_metadata() or ())["penstock-code"]
    return caught.value.code(), str(code), str(caught.value.details())


async def runs(stub: Any, model: str) -> int:
    """Return how many requests its workers have answered."""
    found = await stub.ModelStatistics(pb.ModelStatisticsRequest(name=model), timeout=WAIT_S)
    return int(found.model_stats[0].inference_count)


async def test_steps_sent_out_of_order_run_in_order(server: ServerProcess, stub: Any) -> None:
    third = stub.ModelInfer(step("order", 3, 30.0), timeout=WAIT_S)
    await until_seen(lambda: server.metric("penstock_session_waiting") == 1, "the third waits")
    second = stub.ModelInfer(step("order", 2, 20.0), timeout=WAIT_S)
    await until_seen(lambda: server.metric("penstock_session_waiting") == 2, "the second waits, too")
    first = stub.ModelInfer(step("order", 1, 10.0), timeout=WAIT_S)
    answers = await asyncio.gather(first, second, third)
    assert [(answered(answer), place(answer)) for answer in answers] == [([10.0], 1), ([20.0], 2), ([30.0], 3)]
    await until_seen(lambda: server.metric("penstock_session_waiting") == 0, "nothing waits")


async def test_answers_on_a_stream_are_in_order(stub: Any) -> None:
    async def messages() -> AsyncIterator[pb.ModelInferRequest]:
        for seq_no in (5, 3, 4, 1, 2):
            yield step("stream", seq_no, float(seq_no))

    stream = stub.ModelStreamInfer(messages(), metadata=(("penstock-unordered", "1"),), timeout=WAIT_S)
    answers = [answer.infer_response async for answer in stream]
    assert [answer.id for answer in answers] == [f"stream-{seq_no}" for seq_no in range(1, 6)]
    assert [place(answer) for answer in answers] == [1, 2, 3, 4, 5]


async def test_a_repeat_is_answered_from_the_record(server: ServerProcess, stub: Any) -> None:
    first = await stub.ModelInfer(step("again", 1, 1.0), timeout=WAIT_S)
    again = await stub.ModelInfer(step("again", 1, 2.0), timeout=WAIT_S)
    assert (answered(first), is_repeat(first)) == ([1.0], False)
    assert (answered(again), is_repeat(again), place(again)) == ([1.0], True, 1)
    await until_seen(lambda: server.metric("penstock_session_repeats") >= 1, "it was counted")


async def test_a_step_continues_without_its_caller_and_runs_once(server: ServerProcess, stub: Any) -> None:
    before = await runs(stub, "slow")
    call = stub.ModelInfer(step("leaver", 1, LONG, "slow"), timeout=WAIT_S)
    await until_seen(lambda: server.metric("penstock_inflight_requests") == 1, "it is inside")
    call.cancel()
    await until_seen(lambda: server.metric("penstock_inflight_requests") == 0, "its caller is gone")
    again = await stub.ModelInfer(step("leaver", 1, LONG, "slow"), timeout=WAIT_S)
    assert answered(again) == [LONG]
    assert await runs(stub, "slow") - before == 1


async def test_a_timed_out_step_names_the_missing_one(stub: Any) -> None:
    code, kind, details = await refusal(stub.ModelInfer(step("vain", 2, 1.0, timeout=200_000), timeout=WAIT_S))
    assert (code, kind) == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")
    assert "seq_no 2 of session 'vain' waited for seq_no 1" in details


async def test_the_window_and_the_record_are_limited(stub: Any) -> None:
    code, kind, details = await refusal(stub.ModelInfer(step("far", Sessions.window + 2, 1.0), timeout=WAIT_S))
    assert (code, kind) == (grpc.StatusCode.INVALID_ARGUMENT, "session_error")
    assert "send seq_no 1" in details
    for seq_no in range(1, Sessions.answers + 2):
        await stub.ModelInfer(step("far", seq_no, 1.0), timeout=WAIT_S)
    assert is_repeat(await stub.ModelInfer(step("far", 2, 1.0), timeout=WAIT_S))
    _, _, details = await refusal(stub.ModelInfer(step("far", 1, 1.0), timeout=WAIT_S))
    assert "no longer stored" in details


async def test_sessions_start_and_end(stub: Any) -> None:
    await stub.ModelInfer(step("life", 7, 1.0, sequence_start=True), timeout=WAIT_S)
    last = await stub.ModelInfer(step("life", 8, 2.0, sequence_end=True), timeout=WAIT_S)
    assert place(last) == 2
    assert is_repeat(await stub.ModelInfer(step("life", 8, 2.0, sequence_end=True), timeout=WAIT_S))
    _, kind, details = await refusal(stub.ModelInfer(step("life", 9, 3.0), timeout=WAIT_S))
    assert kind == "session_error"
    assert "has ended" in details
    restarted = await stub.ModelInfer(step("life", 1, 4.0, sequence_start=True), timeout=WAIT_S)
    assert (answered(restarted), place(restarted)) == ([4.0], 1)


async def test_a_session_continues_after_an_invalid_input(stub: Any) -> None:
    wrong = step("wrong", 1, 1.0)
    wrong.inputs[0].name = "nobody"
    for _ in range(2):
        _, kind, _ = await refusal(stub.ModelInfer(wrong, timeout=WAIT_S))
        assert kind == "invalid_tensor"
    following = await stub.ModelInfer(step("wrong", 2, 2.0), timeout=WAIT_S)
    assert (answered(following), place(following)) == ([2.0], 2)


async def test_idle_sessions_are_forgotten(stub: Any) -> None:
    await stub.ModelInfer(step("idle", 1, 1.0, "brief"), timeout=WAIT_S)
    for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0):  # each repeat counts as activity
        await asyncio.sleep(pause_s)
        again = await stub.ModelInfer(step("idle", 1, 2.0, "brief"), timeout=WAIT_S)
        if not is_repeat(again):
            break
    assert answered(again) == [2.0]


def body(session: str, seq_no: int, number: float, **more: bool | int) -> dict[str, Any]:
    return {**floats_json(number), "parameters": {"session_id": session, "seq_no": seq_no, **more}}


async def test_sessions_work_over_rest(server: ServerProcess, http: httpx.AsyncClient) -> None:
    path = "/v2/models/echo/infer"
    second = asyncio.create_task(http.post(path, json=body("rest", 2, 2.0)))
    await until_seen(lambda: server.metric("penstock_session_waiting") == 1, "the second waits")
    first = (await http.post(path, json=body("rest", 1, 1.0))).json()
    assert first["outputs"][0]["data"] == [1.0]
    assert first["parameters"]["session_step"] == 1
    assert (await second).json()["parameters"]["session_step"] == 2
    again = (await http.post(path, json=body("rest", 1, 9.0))).json()
    assert again["outputs"][0]["data"] == [1.0]
    assert again["parameters"]["session_repeat"] is True
    refused = await http.post(path, json=body("rest", 1_000, 1.0))
    assert (refused.status_code, refused.headers["penstock-code"]) == (400, "session_error")
    assert "send seq_no 3" in refused.json()["error"]


async def test_many_sessions_run_at_once_in_any_order(stub: Any) -> None:
    sent = [(f"many-{name}", seq_no) for seq_no in (3, 1, 4, 2) for name in range(50)]
    answers = await asyncio.gather(
        *(stub.ModelInfer(step(*each, float(number)), timeout=WAIT_S) for number, each in enumerate(sent))
    )
    for number, ((_, seq_no), answer) in enumerate(zip(sent, answers, strict=True)):
        assert (answered(answer), place(answer)) == ([float(number)], seq_no)
