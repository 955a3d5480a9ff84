"""The ZeroMQ lane under a dispatcher: how workers join, what they hold, fail, tell, and how they go."""

import asyncio
from contextlib import suppress

import pytest

from benchmarks.waiting import until
from penstock.core.blocks import BlockDescription
from penstock.core.cluster.devices import WorkerDevice
from penstock.core.config import DataPlane
from penstock.core.errors import EngineFailed, InvalidRequest, WorkerLost
from penstock.core.requests import Controls, InferRequest
from penstock.core.settings import Routing
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Tensor
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.lanes.members import ELSEWHERE, SAME_HOST, SAME_ZONE
from penstock.router.lanes.zmq import ENOUGH
from penstock.wire import frames
from penstock.wire.beats import WorkerHeart
from penstock.wire.forms import encode_devices, encode_statistics
from penstock.wire.sockets import host_identity
from tests.unit.router.peers import Bed, Peer, block, offer, request

LARGE = Tensor("x", "UINT8", (2**15,), bytes(2**15))

# --- joining


async def test_a_worker_is_welcomed_and_its_blocks_are_known(bed: Bed) -> None:
    worker = bed.peer("a")
    welcome = await worker.join(offer(block(), 3, weight=2.0), offer(block("blk-2"), is_dormant=True), zone="zone-b")
    assert (welcome.gateway_id, welcome.beat_s) == ("gateway-0", 0.05)
    await until(lambda: bed.changes == 1)
    (known,) = bed.dispatcher.workers()
    assert (known.key, known.worker_id, known.pid, known.zone) == (b"a", "a", 1, "zone-b")
    assert (set(known.blocks), known.dormant, known.resident()) == ({"blk", "blk-2"}, {"blk-2"}, {"blk"})
    assert bed.dispatcher.descriptions() == {"blk": block(), "blk-2": block("blk-2")}
    (standing,) = bed.dispatcher.standing("blk")
    assert (standing.worker, standing.name, standing.credits, standing.weight) == (b"a", "a", 3, 2.0)
    assert (standing.state, standing.distance, standing.in_flight) == ("healthy", ELSEWHERE, 0)
    assert bed.dispatcher.standing("blk-unknown") == []


async def test_how_far_a_worker_is_follows_from_its_host_and_zone(bed: Bed) -> None:
    running = await asyncio.create_subprocess_exec("sleep", "60")
    await bed.worker("a", host=host_identity(), pid=running.pid)
    await bed.worker("b", zone="zone-a")
    await bed.worker("c", zone="zone-c")
    await until(lambda: bed.changes == 3)
    found = {standing.name: standing.distance for standing in bed.dispatcher.standing("blk")}
    assert found == {"a": SAME_HOST, "b": SAME_ZONE, "c": ELSEWHERE}
    running.kill()
    await running.wait()
    await until(lambda: len(bed.dispatcher.workers()) == 2)
    assert bed.counted("workers_lost", reason="died") == 1


async def test_a_worker_that_is_dead_already_does_not_join(bed: Bed) -> None:
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    worker = bed.peer("a")
    worker.say_hello(offer(block()), host=host_identity(), pid=gone.pid)
    worker.send(beat=pb.Beat())
    assert (await worker.get_refused()).message == "say hello first"
    assert bed.dispatcher.workers() == []
    assert not worker.has("welcome")


async def test_jobs_of_one_turn_go_together_to_a_worker_that_takes_them(bed: Bed) -> None:
    worker = await bed.worker("a", offer(block(), 9), takes_jobs=True)
    answers = [bed.ask() for _ in range(3)]
    large = bed.ask(asked=InferRequest("m", [LARGE]))  # in a message of its own, behind them
    after = bed.ask()
    jobs = list((await worker.get("jobs"))[0].jobs.jobs)
    assert [frames.small_tensors(job.inputs)[0].name for job in jobs] == ["x"] * 3
    jobs.append(await worker.get_job())
    jobs += (await worker.get("jobs"))[0].jobs.jobs
    for job in jobs:
        worker.answer(job)
    assert len({id(await asked) for asked in (*answers, large, after)}) == 5
    assert len(jobs) == 5


@pytest.mark.parametrize(("protocol", "first"), [("rest", ENOUGH), ("grpc", 2 * ENOUGH)])
async def test_a_worker_may_begin_where_answers_need_not_come_together(bed: Bed, protocol: str, first: int) -> None:
    worker = await bed.worker("a", offer(block(), 99), takes_jobs=True)
    asked = [bed.ask(asked=InferRequest("m", [], protocol=protocol)) for _ in range(2 * ENOUGH)]
    jobs = list((await worker.get("jobs"))[0].jobs.jobs)
    assert len(jobs) == first
    while len(jobs) < len(asked):
        jobs += (await worker.get("jobs"))[0].jobs.jobs
    for job in jobs:
        worker.answer(job)
    assert len({id(await each) for each in asked}) == len(asked)


async def test_a_caller_that_leaves_in_the_same_turn_cancels_behind_its_job(bed: Bed) -> None:
    worker = await bed.worker("a", offer(block(), 9), takes_jobs=True)
    asked = bed.ask()
    asyncio.get_running_loop().call_soon(asked.cancel)
    await worker.get("cancel")
    assert not worker.has("jobs")  # it came before


async def test_a_hello_in_another_protocol_is_refused(bed: Bed) -> None:
    worker = bed.peer("a")
    worker.say_hello(offer(block()), protocol=99)
    refused = await worker.get_refused()
    assert (refused.code, refused.message) == ("wire_error", "protocol 99 is not spoken here: use 1")
    assert bed.dispatcher.workers() == []
    assert bed.counted("wire_errors") == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (pb.BlockOffer(block_id="other", description=offer(block()).description), "names one block and describes"),
        (pb.BlockOffer(block_id="blk", description=b"{"), "no readable description"),
    ],
)
async def test_a_hello_whose_offers_make_no_sense_is_refused(bed: Bed, wrong: pb.BlockOffer, said: str) -> None:
    worker = bed.peer("a")
    worker.say_hello(wrong)
    assert said in (await worker.get_refused()).message
    assert bed.dispatcher.workers() == []


@pytest.mark.parametrize(
    "frame",
    [
        pb.Frame(beat=pb.Beat()),
        pb.Frame(hand_back=pb.HandBack(job_ids=[1])),
        pb.Frame(probe_result=pb.ProbeResult(block_id="blk")),
        pb.Frame(statistics=pb.Statistics()),
        pb.Frame(bye=pb.Bye()),
    ],
)
async def test_who_has_not_said_hello_is_refused(bed: Bed, frame: pb.Frame) -> None:
    worker = bed.peer("a")
    worker.send_raw(frames.encode(frame))
    refused = await worker.get_refused()
    assert (refused.code, refused.message) == ("unknown_worker", "say hello first")
    assert (bed.counted("wire_errors"), bed.counted("late_replies")) == (1, 0)


async def test_the_result_of_one_that_was_taken_for_dead_counts_as_late(bed: Bed) -> None:
    worker = bed.peer("a")
    worker.send(result=pb.Result(job_id=1, attempt=1))
    assert (await worker.get_refused()).message == "say hello first"
    assert (bed.counted("wire_errors"), bed.counted("late_replies")) == (1, 1)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ([b"\xff\xff"], "not a penstock.v1.Frame"),
        (frames.encode(pb.Frame(welcome=pb.Welcome())), "a worker does not send welcome"),
        ([*frames.encode(pb.Frame(beat=pb.Beat())), b"x"], "a beat with 0 tensors came with 1"),
    ],
)
async def test_what_a_worker_cannot_mean_is_refused(bed: Bed, message: list[bytes], said: str) -> None:
    worker = await bed.worker()
    worker.send_raw(list(message))
    refused = await worker.get_refused()
    assert refused.code == "wire_error"
    assert said in refused.message
    assert len(bed.dispatcher.workers()) == 1


async def test_a_second_hello_tells_what_is_left(bed: Bed) -> None:
    other = block("blk-2")
    worker = await bed.worker("a", offer(block()), offer(other))
    await worker.join(offer(block(), 4), offer(other, is_dormant=True))
    await until(lambda: bed.changes == 2)
    assert bed.lost == [(b"a", {"blk-2"})]
    assert [standing.credits for standing in bed.dispatcher.standing("blk")] == [4]
    await worker.join(offer(block(), 4))
    await until(lambda: bed.changes == 3)
    assert set(bed.dispatcher.descriptions()) == {"blk"}
    assert len(bed.lost) == 1


# --- going


async def move(bed: Bed, first: Peer, leave: object = None) -> None:
    """What ran on the first worker is answered by one that comes after it has gone."""
    answer = bed.ask()
    job = await first.get_job()
    if leave is not None:
        first.send(bye=leave)
    await until(lambda: not bed.dispatcher.workers())
    assert bed.lost == [(b"a", {"blk"})]
    second = await bed.worker("b")
    again = await second.get_job()
    assert (again.job_id, again.attempt) == (job.job_id, 2)
    second.answer(again)
    await answer
    assert bed.counted("retries", reason="worker_lost") == 1


async def test_a_worker_that_says_bye_leaves_its_jobs_to_others(bed: Bed) -> None:
    await move(bed, await bed.worker("a"), pb.Bye(reason="test"))
    assert bed.counted("workers_lost", reason="left") == 1


async def test_a_worker_whose_connection_broke_has_lost_its_jobs_and_is_back(bed: Bed) -> None:
    worker = await bed.worker("a")
    asked = bed.ask()
    first = await worker.get_job()
    worker.say_hello(offer(block()), connection=1)
    second = await worker.get_job()
    assert (second.job_id, second.attempt) == (first.job_id, 2)
    worker.answer(first)
    worker.answer(second)
    await asked
    assert bed.counted("workers_lost", reason="broken") == 1


async def test_a_dead_workers_jobs_fail_where_they_must_not_run_twice(bed: Bed) -> None:
    once = block(is_idempotent=False)
    worker = await bed.worker("a", offer(once))
    answer = bed.ask(once)
    await worker.get_job()
    worker.send(bye=pb.Bye())
    with pytest.raises(WorkerLost, match="must not run a request twice"):
        await answer


class TestSilence:
    @pytest.fixture
    def settings(self) -> DataPlane:
        return DataPlane(beat_s=0.05, silence_s=0.5)

    async def test_a_silent_worker_leaves_its_jobs_to_others(self, bed: Bed) -> None:
        await move(bed, await bed.worker("a"))
        assert bed.counted("workers_lost", reason="silent") >= 1

    async def test_a_worker_whose_heart_beats_is_alive_whatever_its_loop_does(self, bed: Bed) -> None:
        busy = bed.peer("busy")
        welcome = await busy.join(offer(block()))
        heart = WorkerHeart(busy.identity, 0.05)
        heart.meet(welcome.beats)
        await bed.worker("hung")
        await bed.until_counted("workers_lost", reason="silent")
        assert [member.worker_id for member in bed.dispatcher.workers()] == ["busy"]
        heart.close()
        await bed.until_counted("workers_lost", 2, reason="silent")


async def test_a_job_to_a_worker_that_cannot_be_reached_goes_to_another(bed: Bed) -> None:
    first = await bed.worker("a", offer(block(), 1000))
    await until(lambda: bed.changes == 1)
    first.close()
    answers = []
    while bed.dispatcher.workers():  # what is sent before the socket notices is lost until the worker is
        answers.append(bed.ask())
        await asyncio.sleep(0.005)
    assert bed.counted("workers_lost", reason="unreachable") == 1
    second = await bed.worker("b", offer(block(), 1000))
    for _ in answers:
        second.answer(await second.get_job())
    await asyncio.gather(*answers)


async def test_beats_go_both_ways(bed: Bed) -> None:
    worker = await bed.worker()
    bed.ask()
    await worker.get_job()
    frame, _ = await worker.get("beat")
    assert frame.beat.jobs == 1
    assert frame.beat.sent_ns > 0
    device = WorkerDevice("cuda:0", "GPU-1", "H", 100, 60, 0.5, None, {"blk-m": 40})
    worker.send(beat=pb.Beat(jobs=3, memory_bytes=1000, devices=encode_devices([device])))
    (known,) = bed.dispatcher.workers()
    await until(lambda: (known.jobs, known.memory_bytes) == (3, 1000))
    assert known.devices == [device]


async def test_a_gateway_that_stops_says_bye(bed: Bed) -> None:
    first, second = await bed.worker("a"), await bed.worker("b")
    await bed.stop()
    for worker in (first, second):
        frame, _ = await worker.get("bye")
        assert frame.bye.reason == "the gateway stops"


# --- health

FRAIL = {"failures": 1, "eject_s": 0.05, "eject_max_s": 0.05}


async def eject(bed: Bed) -> tuple[BlockDescription, Peer, Peer]:
    """Two workers, of which the first has failed."""
    frail = block(health=FRAIL)
    first, second = await bed.worker("a", offer(frail)), await bed.worker("b", offer(frail))
    await until(lambda: bed.changes == 2)
    while not bed.counted("ejections", event="ejected"):
        answer = bed.ask(frail)
        await until(lambda: first.has("job") or second.has("job"))
        if first.has("job"):
            job = await first.get_job()
            first.send_raw(frames.encode_failure(job.job_id, job.attempt, EngineFailed("it broke")))
        else:
            second.answer(await second.get_job())
        with suppress(EngineFailed):
            await answer
    return frail, first, second


async def test_a_worker_that_fails_is_ejected_probed_and_restored(bed: Bed) -> None:
    frail, first, second = await eject(bed)
    assert bed.lost == [(b"a", {"blk"})]
    standing = {slot.name: slot for slot in bed.dispatcher.standing("blk")}
    assert (standing["a"].state, standing["b"].state) == ("ejected", "healthy")
    assert standing["a"].reason == "1 failures in a row; last: it broke"
    bed.ask(frail)
    waiting = bed.ask(frail)
    await second.get_job()
    assert bed.dispatcher.queue_lengths() == {"blk": (1, 1)}
    frame, _ = await first.get("probe")
    assert frame.probe.block_id == "blk"
    first.send(probe_result=pb.ProbeResult(block_id="blk", problem="still broken"))
    await first.get("probe")
    first.send(probe_result=pb.ProbeResult(block_id="blk"))
    first.answer(await first.get_job())
    await waiting
    assert bed.counted("ejections", event="restored") == 1
    assert {slot.state for slot in bed.dispatcher.standing("blk")} == {"healthy"}


# --- what serving asks


async def test_a_dormant_block_is_woken_on_a_worker_that_has_it(bed: Bed) -> None:
    first = await bed.worker("a")
    second = await bed.worker("b", offer(block("blk-2"), 0, is_dormant=True))
    await until(lambda: bed.changes == 2)
    bed.dispatcher.wake("blk-2")
    frame, _ = await second.get("wake")
    assert frame.wake.block_id == "blk-2"
    bed.dispatcher.wake("blk")  # nobody sleeps
    await first.get("beat")
    await second.get("beat")
    assert not first.has("wake")
    assert not second.has("wake")


async def test_statistics_are_summed_over_workers_and_those_that_left(bed: Bed) -> None:
    workers = [await bed.worker(name) for name in "ab"]
    for expected in (6, 6):
        asked = asyncio.create_task(bed.dispatcher.statistics())
        for worker in workers:
            frame, _ = await worker.get("statistics_query")
            query_id = frame.statistics_query.query_id
            found = BlockStatistics("blk", "m", "1", inference_count=3)
            worker.send_raw(frames.encode(encode_statistics(query_id, [found])))
        (total,) = await asked
        assert (total.block_id, total.model, total.version, total.inference_count) == ("blk", "m", "1", expected)
        if len(workers) == 2:
            workers.pop().send(bye=pb.Bye())
            await until(lambda: len(bed.dispatcher.workers()) == 1)


async def test_one_that_does_not_answer_counts_with_its_last_statistics(bed: Bed) -> None:
    first, second = await bed.worker("a"), await bed.worker("b")
    asked = asyncio.create_task(bed.dispatcher.statistics())
    for worker, count in ((first, 3), (second, 4)):
        frame, _ = await worker.get("statistics_query")
        found = BlockStatistics("blk", "m", "1", inference_count=count)
        worker.send_raw(frames.encode(encode_statistics(frame.statistics_query.query_id, [found])))
    await asked
    asked = asyncio.create_task(bed.dispatcher.statistics())
    frame, _ = await first.get("statistics_query")
    found = BlockStatistics("blk", "m", "1", inference_count=30)
    first.send_raw(frames.encode(encode_statistics(frame.statistics_query.query_id, [found])))
    (total,) = await asked
    assert total.inference_count == 34


async def test_one_that_leaves_is_not_waited_for(bed: Bed) -> None:
    worker = await bed.worker()
    asked = asyncio.create_task(bed.dispatcher.statistics())
    await worker.get("statistics_query")
    worker.send(bye=pb.Bye())
    assert await asked == []
    assert await bed.dispatcher.statistics() == []


async def test_a_routing_that_is_set_stands_before_the_models_own(bed: Bed) -> None:
    hashed = Routing(policy="hash")
    first, second = await bed.worker("a", offer(block(), 1)), await bed.worker("b", offer(block(), 1))
    await until(lambda: bed.changes == 2)
    assert bed.dispatcher.routing(block()) == Routing()
    bed.dispatcher.set_routings({"blk": hashed})
    assert bed.dispatcher.routing(block()) == hashed
    owner = bed.dispatcher.owner("blk", "s")
    assert owner is not None
    asked = request()
    asked.controls = Controls(shard_key="s")
    for _ in range(8):
        answer = bed.ask(asked=asked)
        taker = first if owner.key == b"a" else second
        taker.answer(await taker.get_job())
        await answer
    bed.dispatcher.set_routings({})
    assert bed.dispatcher.routing(block()) == Routing()
    bed.ask(asked=asked)
    bed.ask(asked=asked)
    await asyncio.gather(first.get_job(), second.get_job())


async def test_a_worker_that_joins_later_gets_the_routing_that_was_set(bed: Bed) -> None:
    bed.dispatcher.set_routings({"blk": Routing(policy="hash", without_key="refuse")})
    await bed.worker()
    with pytest.raises(InvalidRequest):
        await bed.ask()


async def test_who_owns_a_key_is_a_worker_that_is_known(bed: Bed) -> None:
    await bed.worker()
    owner = bed.dispatcher.owner("blk", "s")
    assert owner is not None
    assert owner.key == b"a"
    assert bed.dispatcher.owner("blk-unknown", "s") is None


async def test_other_rules_send_what_waited_with_the_next_tick(bed: Bed) -> None:
    bed.dispatcher.set_routings({"blk": Routing(policy="hash")})
    first, second = await bed.worker("a"), await bed.worker("b")
    asked = request()
    asked.controls = Controls(shard_key="s")
    bed.ask(asked=asked)
    bed.ask(asked=asked)
    await until(lambda: first.has("job") or second.has("job"))
    assert bed.dispatcher.queue_lengths() == {"blk": (1, 1)}
    bed.dispatcher.set_routings({})
    await asyncio.gather(first.get_job(), second.get_job())
