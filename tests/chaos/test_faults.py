"""Short runs of the faults of scripts/chaos, against real servers."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from benchmarks.server import ServerProcess
from penstock.experiments.load.drivers import INFER, STREAM
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.v1 import job_pb2
from penstock.wire import job_messages
from penstock.wire.encodings import encode_description
from tests.chaos import malformed
from tests.chaos.checked_load import CheckedLoad, EchoQuestion
from tests.chaos.departures import CALLERS, HANG_S, end_worker, stop_worker
from tests.chaos.drain import IN_FLIGHT, drain_server
from tests.chaos.infer_messages import list_valid_requests
from tests.chaos.kill import kill_workers
from tests.chaos.malformed_zmq import BLOCK, HOST, ZmqAttack
from tests.chaos.report import ChaosPlan
from tests.chaos.repository import HEAVY, add_echo, add_shipped

MODELS = Path(__file__).parents[2] / "models"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start a server with two workers, whose model is idempotent, so that jobs of killed workers are repeated."""
    folder = tmp_path_factory.mktemp("two-workers")
    add_echo(folder / "models")
    settings = {"data_plane": {"hang_s": HANG_S}}
    with ServerProcess(folder / "models", folder / "server", "--workers", "2", settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ChaosPlan:
    return ChaosPlan(MODELS, tmp_path_factory.mktemp("malformed"), is_quick=True)


@pytest.fixture(scope="module")
def every_model(plan: ChaosPlan) -> Iterator[ServerProcess]:
    malformed.add_models(plan)
    with ServerProcess(plan.folder / "models", plan.folder / "server") as server:
        yield server


@pytest.fixture
async def channel(every_model: ServerProcess) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(every_model.grpc) as channel:
        yield channel


async def test_killed_workers_cost_no_request(two_workers: ServerProcess, plan: ChaosPlan) -> None:
    async with CheckedLoad(two_workers.grpc, [EchoQuestion()]) as load:
        kills = await kill_workers(two_workers, load, count=2, lived_s=0.0, plan=plan)
    assert len(kills.away_s) == 2
    assert (load.tally.failed, load.tally.duplicates) == (0, 0), load.tally.details()
    assert two_workers.metric("penstock_retries_total", reason="worker_lost") > 0


async def test_a_worker_that_hangs_costs_no_request(two_workers: ServerProcess) -> None:
    async with CheckedLoad(two_workers.grpc, [EchoQuestion()]) as load:
        await stop_worker(two_workers, load, 0)
    assert (load.tally.failed, load.tally.duplicates) == (0, 0), load.tally.details()


async def test_a_stopping_worker_hands_back_steps_that_must_not_run_twice(tmp_path: Path) -> None:
    add_echo(tmp_path / "models", HEAVY, is_idempotent=False)
    with ServerProcess(tmp_path / "models", tmp_path / "server", "--workers", "2") as server:
        async with CheckedLoad(server.grpc, [EchoQuestion()], CALLERS) as load:
            for number in range(2):
                await end_worker(server, load, number)
        assert (load.tally.failed, load.tally.duplicates) == (0, 0), load.tally.details()
        assert server.metric("penstock_retries_total", reason="handed_back") > 0
        assert server.metric("penstock_retries_total", reason="worker_lost") == 0


async def test_a_stopping_server_answers_accepted_requests(tmp_path: Path) -> None:
    add_shipped(tmp_path / "models", MODELS, "srcnn")
    with ServerProcess(tmp_path / "models", tmp_path / "server") as server:
        await server.wait_all_workers()
        found = await drain_server(server)
    assert found["inside"] == {"OK": IN_FLIGHT}
    assert set(found["came_later"]) == {"UNAVAILABLE"}
    assert found["exit_code"] == 0


async def test_malformed_messages_get_typed_errors(every_model: ServerProcess, plan: ChaosPlan) -> None:
    await every_model.wait_all_workers()
    result = await malformed.attack(every_model, 1000, plan, rounds=2)
    # Memory is not checked, because this needs more messages.
    missed = [bar for bar in result.missed() if bar.figure != "malformed_rss_growth"]
    assert not missed, result.details
    assert result.figures["malformed_sent"] >= 1000


async def test_a_message_that_cannot_be_parsed_is_the_callers_fault(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(INFER)(b"\xff\xff", timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_survives_invalid_messages_and_answers_all_requests(
    channel: grpc.aio.Channel,
) -> None:
    good = [request.SerializeToString() for request in list_valid_requests()]
    stream = channel.stream_stream(STREAM, response_deserializer=pb.ModelStreamInferResponse.FromString)
    answers = [answer async for answer in stream(iter([*good, b"\xff\xff", *good]), timeout=60)]
    assert [bool(answer.error_message) for answer in answers] == [False] * 4 + [True] + [False] * 4


async def test_a_method_that_is_not_offered_leaves_no_traceback(
    every_model: ServerProcess, channel: grpc.aio.Channel
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/inference.GRPCInferenceService/TraceSetting")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not every_model.tracebacks()


async def test_nonsense_of_one_worker_leaves_the_gateway_to_the_others(every_model: ServerProcess) -> None:
    """Contradictory offers are refused, and sums of a worker's counts stay within their fields."""
    offer = job_pb2.BlockOffer(block_id="blk-other", credits=1, description=encode_description(BLOCK))
    hello = job_pb2.Hello(protocol=job_messages.PROTOCOL, worker_id="liar", host=HOST)
    lying = job_pb2.Hello(protocol=job_messages.PROTOCOL, worker_id="liar", host=HOST, blocks=[offer])
    counted = job_pb2.BlockStatistics(block_id="blk-chaos", inference_count=2**64 - 1)
    said = [
        job_pb2.Header(hello=lying),
        job_pb2.Header(hello=hello),
        job_pb2.Header(statistics=job_pb2.Statistics(blocks=[counted])),
    ]
    attack = ZmqAttack(every_model.router_endpoint(), count=1, seed=0)
    for _ in range(2):
        await attack.send_batch([job_messages.encode(header) for header in said])
    assert attack.answers.kinds == {"zmq refused": 2, "zmq taken": 4}
    async with grpc.aio.insecure_channel(every_model.grpc) as channel:
        await channel.unary_unary("/inference.GRPCInferenceService/ModelStatistics")(b"", timeout=10)
    assert await attack.is_well()
    assert not every_model.tracebacks()
