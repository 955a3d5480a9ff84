"""The socket lane with a dispatcher: workers join, hold jobs, fail, report, and leave."""

import asyncio
from contextlib import suppress
from typing import ClassVar

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
from penstock.router.lanes.lane_members import ELSEWHERE, SAME_HOST, SAME_ZONE
from penstock.router.lanes.socket_lane import MIN_IMMEDIATE_JOBS
from penstock.wire import job_messages
from penstock.wire.encodings import encode_devices, encode_statistics
from penstock.wire.heartbeats import WorkerHeartbeats
from penstock.wire.sockets import read_host_identity
from tests.unit.router.peers import Bed, Peer, block, offer, request

LARGE = Tensor("x", "UINT8", (2**15,), bytes(2**15))

# --- joining


async def test_a_worker_is_welcomed_and_its_blocks_are_known(bed: Bed) -> None:
    worker = bed.peer("a")
    welcome = await worker.join(offer(block(), 3, weight=2.0), offer(block("blk-2"), is_dormant=True), zone="zone-b")
    assert (welcome.gateway_id, welcome.beat_s) == ("gateway-0", 0.05)
    await until(lambda: bed.changes == 1)
    (known,) = bed.dispatcher.list_workers()
    assert (known.key, known.worker_id, known.pid, known.zone) == (b"a", "a", 1, "zone-b")
    assert (set(known.blocks), known.dormant, known.list_loaded_blocks()) == ({"blk", "blk-2"}, {"blk-2"}, {"blk"})
    assert bed.dispatcher.list_descriptions() == {"blk": block(), "blk-2": block("blk-2")}
    (standing,) = bed.dispatcher.list_slot_states("blk")
    assert (standing.worker, standing.name, standing.credits, standing.weight) == (b"a", "a", 3, 2.0)
    assert (standing.state, standing.distance, standing.in_flight) == ("healthy", ELSEWHERE, 0)
    assert bed.dispatcher.list_slot_states("blk-unknown") == []


async def test_the_distance_of_a_worker_follows_from_its_host_and_zone(bed: Bed) -> None:
    running = await asyncio.create_subprocess_exec("sleep", "60")
    await bed.worker("a", host=read_host_identity(), pid=running.pid)
    await bed.worker("b", zone="zone-a")
    await bed.worker("c", zone="zone-c")
    await until(lambda: bed.changes == 3)
    found = {standing.name: standing.distance for standing in bed.dispatcher.list_slot_states("blk")}
    assert found == {"a": SAME_HOST, "b": SAME_ZONE, "c": ELSEWHERE}
    running.kill()
    await running.wait()
    await until(lambda: len(bed.dispatcher.list_workers()) == 2)
    assert bed.counted("workers_lost", reason="died") == 1


async def test_a_dead_worker_does_not_join(bed: Bed) -> None:
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    worker = bed.peer("a")
    worker.say_hello(offer(block()), host=read_host_identity(), pid=gone.pid)
    worker.send(beat=pb.Beat())
    assert (await worker.get_refused()).message == "the gateway does not know this worker: send a hello message first"
    assert bed.dispatcher.list_workers() == []
    assert not worker.has("welcome")


async def test_jobs_of_one_turn_are_sent_in_one_message_to_workers_that_accept_it(bed: Bed) -> None:
    worker = await bed.worker("a", offer(block(), 9), takes_jobs=True)
    answers = [bed.ask() for _ in range(3)]
    large = bed.ask(asked=InferRequest("m", [LARGE]))  # in a separate message after them
    after = bed.ask()
    jobs = list((await worker.get("jobs"))[0].jobs.jobs)
    assert [job_messages.decode_small_tensors(job.inputs)[0].name for job in jobs] == ["x"] * 3
    jobs.append(await worker.get_job())
    jobs += (await worker.get("jobs"))[0].jobs.jobs
    for job in jobs:
        worker.answer(job)
    assert len({id(await asked) for asked in (*answers, large, after)}) == 5
    assert len(jobs) == 5


@pytest.mark.parametrize(("protocol", "first"), [("rest", MIN_IMMEDIATE_JOBS), ("grpc", 2 * MIN_IMMEDIATE_JOBS)])
async def test_jobs_are_sent_in_parts_if_their_answers_need_not_arrive_together(
    bed: Bed, protocol: str, first: int
) -> None:
    worker = await bed.worker("a", offer(block(), 99), takes_jobs=True)
    asked = [bed.ask(asked=InferRequest("m", [], protocol=protocol)) for _ in range(2 * MIN_IMMEDIATE_JOBS)]
    jobs = list((await worker.get("jobs"))[0].jobs.jobs)
    assert len(jobs) == first
    while len(jobs) < len(asked):
        jobs += (await worker.get("jobs"))[0].jobs.jobs
    for job in jobs:
        worker.answer(job)
    assert len({id(await each) for each in asked}) == len(asked)


async def test_a_caller_that_leaves_in_the_same_turn_cancels_after_its_job(bed: Bed) -> None:
    worker = await bed.worker("a", offer(block(), 9), takes_jobs=True)
    asked = bed.ask()
    asyncio.get_running_loop().call_soon(asked.cancel)
    await worker.get("cancel")
    assert not worker.has("jobs")  # it was sent before


async def test_a_hello_with_another_protocol_version_is_refused(bed: Bed) -> None:
    worker = bed.peer("a")
    worker.say_hello(offer(block()), protocol=99)
    refused = await worker.get_refused()
    assert (refused.code, refused.message) == ("wire_error", "protocol version 99 is not supported: use version 1")
    assert bed.dispatcher.list_workers() == []
    assert bed.counted("wire_errors") == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (pb.BlockOffer(block_id="other", description=offer(block()).description), "block_id of an offer differs"),
        (pb.BlockOffer(block_id="blk", description=b"{"), "an invalid description"),
    ],
)
async def test_a_hello_with_contradictory_offers_is_refused(bed: Bed, wrong: pb.BlockOffer, said: str) -> None:
    worker = bed.peer("a")
    worker.say_hello(wrong)
    assert said in (await worker.get_refused()).message
    assert bed.dispatcher.list_workers() == []


@pytest.mark.parametrize(
    "header",
    [
        pb.Header(beat=pb.Beat()),
        pb.Header(hand_back=pb.HandBack(job_ids=[1])),
        pb.Header(probe_result=pb.ProbeResult(block_id="blk")),
        pb.Header(statistics=pb.Statistics()),
        pb.Header(bye=pb.Bye()),
    ],
)
async def test_messages_before_hello_are_refused(bed: Bed, header: pb.Header) -> None:
    worker = bed.peer("a")
    worker.send_raw(job_messages.encode(header))
    refused = await worker.get_refused()
    assert (refused.code, refused.message) == (
        "unknown_worker",
        "the gateway does not know this worker: send a hello message first",
    )
    assert (bed.counted("wire_errors"), bed.counted("late_replies")) == (1, 0)


async def test_the_result_of_a_worker_considered_dead_counts_as_late(bed: Bed) -> None:
    worker = bed.peer("a")
    worker.send(result=pb.Result(job_id=1, attempt=1))
    assert (await worker.get_refused()).message == "the gateway does not know this worker: send a hello message first"
    assert (bed.counted("wire_errors"), bed.counted("late_replies")) == (1, 1)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ([b"\xff\xff"], "not a penstock.v1.Header"),
        (job_messages.encode(pb.Header(welcome=pb.Welcome())), "unexpected message 'welcome' from a worker"),
        ([*job_messages.encode(pb.Header(beat=pb.Beat())), b"x"], "a beat with 0 tensors came with 1"),
    ],
)
async def test_invalid_messages_of_a_worker_are_refused(bed: Bed, message: list[bytes], said: str) -> None:
    worker = await bed.worker()
    worker.send_raw(list(message))
    refused = await worker.get_refused()
    assert refused.code == "wire_error"
    assert said in refused.message
    assert len(bed.dispatcher.list_workers()) == 1


async def test_a_second_hello_replaces_the_offers(bed: Bed) -> None:
    other = block("blk-2")
    worker = await bed.worker("a", offer(block()), offer(other))
    await worker.join(offer(block(), 4), offer(other, is_dormant=True))
    await until(lambda: bed.changes == 2)
    assert bed.lost == [(b"a", {"blk-2"})]
    assert [standing.credits for standing in bed.dispatcher.list_slot_states("blk")] == [4]
    await worker.join(offer(block(), 4))
    await until(lambda: bed.changes == 3)
    assert set(bed.dispatcher.list_descriptions()) == {"blk"}
    assert len(bed.lost) == 1


# --- leaving


async def move(bed: Bed, first: Peer, leave: object = None) -> None:
    """Check that a job of a lost worker is answered by the worker that joins next."""
    answer = bed.ask()
    job = await first.get_job()
    if leave is not None:
        first.send(bye=leave)
    await until(lambda: not bed.dispatcher.list_workers())
    assert bed.lost == [(b"a", {"blk"})]
    second = await bed.worker("b")
    again = await second.get_job()
    assert (again.job_id, again.attempt) == (job.job_id, 2)
    second.answer(again)
    await answer
    assert bed.counted("retries", reason="worker_lost") == 1


async def test_the_jobs_of_a_worker_that_says_bye_are_sent_to_others(bed: Bed) -> None:
    await move(bed, await bed.worker("a"), pb.Bye(reason="test"))
    assert bed.counted("workers_lost", reason="left") == 1


async def test_a_worker_that_reconnects_has_lost_its_jobs(bed: Bed) -> None:
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


async def test_a_dead_workers_jobs_fail_if_they_must_not_run_twice(bed: Bed) -> None:
    once = block(is_idempotent=False)
    worker = await bed.worker("a", offer(once))
    answer = bed.ask(once)
    await worker.get_job()
    worker.send(bye=pb.Bye())
    with pytest.raises(WorkerLost, match="must not run a request twice"):
        await answer


class QuickPlane(DataPlane):
    beat_s: ClassVar[float] = 0.05
    silence_s: ClassVar[float] = 0.5


class TestSilence:
    @pytest.fixture
    def settings(self) -> DataPlane:
        return QuickPlane()

    async def test_the_jobs_of_a_silent_worker_are_sent_to_others(self, bed: Bed) -> None:
        await move(bed, await bed.worker("a"))
        assert bed.counted("workers_lost", reason="silent") >= 1

    async def test_a_worker_with_heartbeats_is_alive_whatever_its_loop_does(self, bed: Bed) -> None:
        busy = bed.peer("busy")
        welcome = await busy.join(offer(block()))
        heartbeats = WorkerHeartbeats(busy.identity, 0.05)
        heartbeats.add_gateway(welcome.beats)
        await bed.worker("hung")
        await bed.until_counted("workers_lost", reason="silent")
        assert [member.worker_id for member in bed.dispatcher.list_workers()] == ["busy"]
        heartbeats.close()
        await bed.until_counted("workers_lost", 2, reason="silent")


async def test_a_job_for_an_unreachable_worker_is_sent_to_another(bed: Bed) -> None:
    first = await bed.worker("a", offer(block(), 1000))
    await until(lambda: bed.changes == 1)
    first.close()
    answers = []
    while bed.dispatcher.list_workers():  # messages_sent before the socket notices are lost until the worker is
        answers.append(bed.ask())
        await asyncio.sleep(0.005)
    assert bed.counted("workers_lost", reason="unreachable") == 1
    second = await bed.worker("b", offer(block(), 1000))
    for _ in answers:
        second.answer(await second.get_job())
    await asyncio.gather(*answers)


async def test_heartbeats_are_sent_in_both_directions(bed: Bed) -> None:
    worker = await bed.worker()
    bed.ask()
    await worker.get_job()
    header, _ = await worker.get("beat")
    assert header.beat.jobs == 1
    assert header.beat.sent_ns > 0
    device = WorkerDevice("cuda:0", "GPU-1", "H", 100, 60, 0.5, None, {"blk-m": 40})
    worker.send(beat=pb.Beat(jobs=3, memory_bytes=1000, devices=encode_devices([device])))
    (known,) = bed.dispatcher.list_workers()
    await until(lambda: (known.jobs, known.memory_bytes) == (3, 1000))
    assert known.devices == [device]


async def test_a_stopping_gateway_says_bye(bed: Bed) -> None:
    first, second = await bed.worker("a"), await bed.worker("b")
    await bed.stop()
    for worker in (first, second):
        header, _ = await worker.get("bye")
        assert header.bye.reason == "the gateway stops"


# --- health

FRAIL = {"failures": 1, "eject_s": 0.05}


async def eject(bed: Bed) -> tuple[BlockDescription, Peer, Peer]:
    """Return two workers, the first of which has failed."""
    frail = block(health=FRAIL)
    first, second = await bed.worker("a", offer(frail)), await bed.worker("b", offer(frail))
    await until(lambda: bed.changes == 2)
    while not bed.counted("ejections", event="ejected"):
        answer = bed.ask(frail)
        await until(lambda: first.has("job") or second.has("job"))
        if first.has("job"):
            job = await first.get_job()
            first.send_raw(job_messages.encode_failure(job.job_id, job.attempt, EngineFailed("it broke")))
        else:
            second.answer(await second.get_job())
        with suppress(EngineFailed):
            await answer
    return frail, first, second


async def test_a_failing_worker_is_ejected_probed_and_restored(bed: Bed) -> None:
    frail, first, second = await eject(bed)
    assert bed.lost == [(b"a", {"blk"})]
    standing = {slot.name: slot for slot in bed.dispatcher.list_slot_states("blk")}
    assert (standing["a"].state, standing["b"].state) == ("ejected", "healthy")
    assert standing["a"].reason == "1 failures in a row; last: it broke"
    bed.ask(frail)
    waiting = bed.ask(frail)
    await second.get_job()
    assert bed.dispatcher.count_jobs_by_block() == {"blk": (1, 1)}
    header, _ = await first.get("probe")
    assert header.probe.block_id == "blk"
    first.send(probe_result=pb.ProbeResult(block_id="blk", problem="still broken"))
    await first.get("probe")
    first.send(probe_result=pb.ProbeResult(block_id="blk"))
    first.answer(await first.get_job())
    await waiting
    assert bed.counted("ejections", event="restored") == 1
    assert {slot.state for slot in bed.dispatcher.list_slot_states("blk")} == {"healthy"}


# --- queries of serving


async def test_a_dormant_block_is_woken_on_a_worker_that_holds_it(bed: Bed) -> None:
    first = await bed.worker("a")
    second = await bed.worker("b", offer(block("blk-2"), 0, is_dormant=True))
    await until(lambda: bed.changes == 2)
    bed.dispatcher.wake("blk-2")
    header, _ = await second.get("wake")
    assert header.wake.block_id == "blk-2"
    bed.dispatcher.wake("blk")  # no block is dormant
    await first.get("beat")
    await second.get("beat")
    assert not first.has("wake")
    assert not second.has("wake")


async def test_statistics_are_summed_over_present_and_former_workers(bed: Bed) -> None:
    workers = [await bed.worker(name) for name in "ab"]
    for expected in (6, 6):
        asked = asyncio.create_task(bed.dispatcher.collect_statistics())
        for worker in workers:
            header, _ = await worker.get("statistics_query")
            query_id = header.statistics_query.query_id
            found = BlockStatistics("blk", "m", "1", inference_count=3)
            worker.send_raw(job_messages.encode(encode_statistics(query_id, [found])))
        (total,) = await asked
        assert (total.block_id, total.model, total.version, total.inference_count) == ("blk", "m", "1", expected)
        if len(workers) == 2:
            workers.pop().send(bye=pb.Bye())
            await until(lambda: len(bed.dispatcher.list_workers()) == 1)


async def test_a_worker_that_does_not_answer_counts_with_its_last_statistics(bed: Bed) -> None:
    first, second = await bed.worker("a"), await bed.worker("b")
    asked = asyncio.create_task(bed.dispatcher.collect_statistics())
    for worker, count in ((first, 3), (second, 4)):
        header, _ = await worker.get("statistics_query")
        found = BlockStatistics("blk", "m", "1", inference_count=count)
        worker.send_raw(job_messages.encode(encode_statistics(header.statistics_query.query_id, [found])))
    await asked
    asked = asyncio.create_task(bed.dispatcher.collect_statistics())
    header, _ = await first.get("statistics_query")
    found = BlockStatistics("blk", "m", "1", inference_count=30)
    first.send_raw(job_messages.encode(encode_statistics(header.statistics_query.query_id, [found])))
    (total,) = await asked
    assert total.inference_count == 34


async def test_a_leaving_workers_statistics_are_not_awaited(bed: Bed) -> None:
    worker = await bed.worker()
    asked = asyncio.create_task(bed.dispatcher.collect_statistics())
    await worker.get("statistics_query")
    worker.send(bye=pb.Bye())
    assert await asked == []
    assert await bed.dispatcher.collect_statistics() == []


async def test_a_configured_routing_takes_precedence_over_the_models_own(bed: Bed) -> None:
    hashed = Routing(policy="hash")
    first, second = await bed.worker("a", offer(block(), 1)), await bed.worker("b", offer(block(), 1))
    await until(lambda: bed.changes == 2)
    assert bed.dispatcher.get_routing(block()) == Routing()
    bed.dispatcher.set_routings({"blk": hashed})
    assert bed.dispatcher.get_routing(block()) == hashed
    owner = bed.dispatcher.find_owner("blk", "s")
    assert owner is not None
    asked = request()
    asked.controls = Controls(shard_key="s")
    for _ in range(8):
        answer = bed.ask(asked=asked)
        taker = first if owner.key == b"a" else second
        taker.answer(await taker.get_job())
        await answer
    bed.dispatcher.set_routings({})
    assert bed.dispatcher.get_routing(block()) == Routing()
    bed.ask(asked=asked)
    bed.ask(asked=asked)
    await asyncio.gather(first.get_job(), second.get_job())


async def test_a_worker_that_joins_later_gets_the_configured_routing(bed: Bed) -> None:
    bed.dispatcher.set_routings({"blk": Routing(policy="hash", without_key="refuse")})
    await bed.worker()
    with pytest.raises(InvalidRequest):
        await bed.ask()


async def test_the_owner_of_a_key_is_a_known_worker(bed: Bed) -> None:
    await bed.worker()
    owner = bed.dispatcher.find_owner("blk", "s")
    assert owner is not None
    assert owner.key == b"a"
    assert bed.dispatcher.find_owner("blk-unknown", "s") is None


async def test_changed_rules_send_waiting_jobs_with_the_next_tick(bed: Bed) -> None:
    bed.dispatcher.set_routings({"blk": Routing(policy="hash")})
    first, second = await bed.worker("a"), await bed.worker("b")
    asked = request()
    asked.controls = Controls(shard_key="s")
    bed.ask(asked=asked)
    bed.ask(asked=asked)
    await until(lambda: first.has("job") or second.has("job"))
    assert bed.dispatcher.count_jobs_by_block() == {"blk": (1, 1)}
    bed.dispatcher.set_routings({})
    await asyncio.gather(first.get_job(), second.get_job())
