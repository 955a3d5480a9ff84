"""Runs sessions while workers are killed; and tests that the checks of scripts/chaos detect lost and repeated steps."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from benchmarks.server import ServerProcess
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.repository import ECHO, add_echo
from tests.chaos.session_load import QUESTION, AnsweredStep, SessionTally, Shape
from tests.chaos.sessions import NO_WORK, WORKERS, play

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("sessions")
    add_echo(folder / "models", NO_WORK)
    with ServerProcess(folder / "models", folder / "server", "--workers", str(WORKERS)) as running:
        yield running


async def test_each_request_of_a_session_runs_once(server: ServerProcess) -> None:
    await server.wait_all_workers()
    shape = Shape("once", sessions=100, clients=4, twice=0.5, kills=0)
    before = await count_runs(server)
    tally = await play(server, shape, lambda line: None)
    assert tally.violations == 0, tally.details()
    assert tally.sent_twice > 300
    assert tally.answered == tally.sent == 1000 + tally.sent_twice
    assert await count_runs(server) - before == 1000


async def test_killed_workers_disturb_no_session(server: ServerProcess) -> None:
    await server.wait_all_workers()
    shape = Shape("killed", sessions=300, clients=8, kills=1)
    tally = await play(server, shape, lambda line: None)
    assert (tally.violations, tally.kills) == (0, 1), tally.details()


async def count_runs(server: ServerProcess) -> int:
    """Return how many requests the workers' model has answered."""
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        request = pb.ModelStatisticsRequest(name=ECHO)
        found = await GRPCInferenceServiceStub(channel).ModelStatistics(request, timeout=30)
    return int(found.model_stats[0].inference_count)


def make_answer(arrival: int, seq_no: int, place: int, content: int) -> AnsweredStep:
    response = pb.ModelInferResponse(raw_output_contents=QUESTION.ask(content).raw_input_contents)
    response.parameters["session_step"].int64_param = place
    return AnsweredStep(seq_no, seq_no, arrival, response)


def make_answers(*answers: tuple[int, int, int]) -> SessionTally:
    """Return a session's answers in order of arrival. Each argument is an answer's number, place and content."""
    tally = SessionTally()
    tally.check(make_answer(arrival, *answer) for arrival, answer in enumerate(answers))
    return tally


def test_the_check_detects_violations() -> None:
    assert make_answers((1, 1, 1), (2, 2, 2), (2, 2, 2), (3, 3, 3)).violations == 0
    assert make_answers((1, 1, 1), (2, 2, 3)).wrong == 1
    assert make_answers((1, 1, 1), (2, 3, 2), (3, 2, 3)).out_of_order == 2
    assert make_answers((2, 2, 2), (1, 1, 1)).out_of_order == 1
    assert make_answers((1, 1, 1), (1, 2, 1)).ran_twice == 1
