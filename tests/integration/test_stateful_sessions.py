"""Sessions of a model with state: requests arrive complete and in order, and no session continues with lost state."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import grpc
import numpy as np
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually, until_seen
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import ROOT

WAIT_S = 60.0
MODEL = "session_counter"
SESSIONS = 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("stateful")
    shutil.copytree(ROOT / "tests/data/python_models" / MODEL, folder / "models" / MODEL)
    with ServerProcess(folder / "models", folder, "--workers", "2") as running:
        eventually(lambda: len(ready(running)) == 2, "both workers hold the model", WAIT_S)
        yield running


@pytest.fixture
async def stub(server: ServerProcess) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        yield GRPCInferenceServiceStub(channel)


def ready(server: ServerProcess) -> dict[str, int]:
    return {worker["id"]: worker["pid"] for worker in server.status()["workers"] if worker["blocks"]}


def step(session: str, seq_no: int, is_start: bool = False) -> pb.ModelInferRequest:
    """Return a request that adds its own number to the session's sum."""
    message = pb.ModelInferRequest(model_name=MODEL)
    message.inputs.add(name="INPUT", datatype="INT32", shape=(1,))
    message.raw_input_contents.append(np.array([seq_no], np.int32).tobytes())
    message.parameters["session_id"].string_param = session
    message.parameters["seq_no"].int64_param = seq_no
    message.parameters["sequence_start"].bool_param = is_start
    return message


def seen(answer: pb.ModelInferResponse) -> tuple[int, list[int]]:
    """Return the sum, and the numbers of the session that the model has seen."""
    found = {output.name: data for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True)}
    (total,) = np.frombuffer(found["SUM"], np.int64).tolist()
    return total, np.frombuffer(found["SEEN"], np.int64).tolist()


async def test_the_model_sees_complete_sessions_in_order(stub: Any) -> None:
    sent = [(f"whole-{name}", seq_no) for name in range(20) for seq_no in range(1, 11)]
    sent += sent[::7]  # some twice
    Random(3).shuffle(sent)
    answers = await asyncio.gather(*(stub.ModelInfer(step(*each), timeout=WAIT_S) for each in sent))
    for (_, seq_no), answer in zip(sent, answers, strict=True):
        numbers = list(range(1, seq_no + 1))
        assert seen(answer) == (sum(numbers), numbers)


async def test_a_session_keeps_its_state_or_ends_with_its_worker(server: ServerProcess, stub: Any) -> None:
    names = [f"mortal-{number}" for number in range(SESSIONS)]
    for seq_no in (1, 2):
        await asyncio.gather(*(stub.ModelInfer(step(name, seq_no), timeout=WAIT_S) for name in names))
    before = ready(server)
    victim = min(before)
    os.kill(before[victim], signal.SIGKILL)
    outcomes = await asyncio.gather(*(go_on(stub, name) for name in names))
    lost = [name for name, outcome in zip(names, outcomes, strict=True) if isinstance(outcome, str)]
    kept = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    assert 0 < len(lost) < SESSIONS
    assert all("its worker is gone and with it the model's state" in each for each in outcomes if isinstance(each, str))
    assert kept == [(6, [1, 2, 3])] * len(kept)
    restarted = await stub.ModelInfer(step(lost[0], 1, is_start=True), timeout=WAIT_S)
    assert seen(restarted) == (1, [1])
    await until_seen(lambda: ready(server).get(victim, before[victim]) != before[victim], "the worker is back", WAIT_S)
    following = await asyncio.gather(*(go_on(stub, name, 4) for name in names if name not in lost))
    assert following == [(10, [1, 2, 3, 4])] * len(kept)  # a returned worker takes over no session


async def test_a_session_does_not_continue_with_another_model(server: ServerProcess, stub: Any) -> None:
    names = [f"outlived-{number}" for number in range(4)]
    folder = server.models / MODEL
    for told in (
        "its worker is gone and with it the model's state",
        "another version has replaced the model",
    ):
        await asyncio.gather(*(stub.ModelInfer(step(name, 1, is_start=True), timeout=WAIT_S) for name in names))
        await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=MODEL), timeout=WAIT_S)
        outcomes = await asyncio.gather(*(go_on(stub, name, 2) for name in names))
        assert all(told in outcome for outcome in outcomes if isinstance(outcome, str)), outcomes
        assert all(isinstance(outcome, str) for outcome in outcomes), outcomes
        shutil.copytree(folder / "1", folder / "2", dirs_exist_ok=True)
    restarted = await stub.ModelInfer(step(names[0], 1, is_start=True), timeout=WAIT_S)
    assert seen(restarted) == (1, [1])
    assert restarted.model_version == "2"


async def go_on(stub: Any, session: str, seq_no: int = 3) -> tuple[int, list[int]] | str:
    """Return the answer, or the error that the session is lost."""
    while True:
        try:
            return seen(await stub.ModelInfer(step(session, seq_no), timeout=WAIT_S))
        except grpc.aio.AioRpcError as error:
            code = dict(error.trailing_metadata() or ())["penstock-code"]
            if code == "session_error":
                return str(error.details())
            assert code == "worker_lost"  # it ran when the worker died: a repeat gets the session's error
