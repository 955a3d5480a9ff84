"""Ordered sessions over several gateways: one gateway owns each session, others forward to it, and owners change."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.waiting import until
from penstock.core.blocks import BlockDescription
from penstock.core.errors import DeadlineExceeded, Draining, GatewayLost, ModelNotReady, SessionError, WorkerLost
from penstock.core.requests import InferRequest, InferResponse
from penstock.features.sessions import ordered_sessions, peers, session_errors
from tests.unit.features.sessions.gateways import Cluster, block, is_repeat, place
from tests.unit.features.sessions.memory_store import MemorySessionStore


@pytest.fixture(params=["from the last owner", "from the store"])
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path, MemorySessionStore() if "store" in request.param else None)
    yield made
    made.engine.may_run.set()
    await made.close()


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path, MemorySessionStore())
    yield made
    made.engine.may_run.set()
    await made.close()


async def test_steps_sent_to_any_gateway_run_once_and_in_order(cluster: Cluster) -> None:
    cluster.add("a", "b", "c")
    gateways = list(cluster.gateways.values())
    sent = [(f"s-{n}", seq_no) for n in range(12) for seq_no in (2, 3, 1, 2)]
    answers = await asyncio.gather(*(gateways[i % 3].send(*each) for i, each in enumerate(sent)))
    assert [place(answer) for answer in answers] == [seq_no for _, seq_no in sent]
    for n in range(12):
        assert [each for each in cluster.engine.ran if each[0] == f"s-{n}"] == [(f"s-{n}", k) for k in (1, 2, 3)]
    assert sum(gateway.forwarded_requests for gateway in gateways) > 0
    again = await asyncio.gather(*(gateway.send("s-0", 2) for gateway in gateways))
    assert all(is_repeat(answer) for answer in again)


async def test_a_single_gateway_forwards_nothing(cluster: Cluster) -> None:
    cluster.add("a")
    assert place(await cluster.gateways["a"].send("s", 1)) == 1


@pytest.mark.parametrize("session_at", ["a", "b"])
async def test_a_session_without_numbers_runs_in_order_of_arrival(cluster: Cluster, session_at: str) -> None:
    cluster.add("a", "b")
    session = cluster.session_of(session_at)
    for number in range(1, 4):
        assert place(await cluster.gateways["ab"[number % 2]].send(session, None)) == number


async def test_an_added_gateway_takes_over_its_sessions_with_their_records(cluster: Cluster) -> None:
    cluster.add("a", "b")
    names = [f"s-{n}" for n in range(30)]
    for seq_no in (1, 2):
        await asyncio.gather(*(cluster.gateways["a"].send(name, seq_no) for name in names))
    before = {name: cluster.owner(name) for name in names}
    cluster.add("c")
    moved = [name for name in names if cluster.owner(name) != before[name]]
    assert moved
    assert {cluster.owner(name) for name in moved} == {"c"}
    answers = await asyncio.gather(*(cluster.gateways["b"].send(name, 3) for name in names))
    assert [place(answer) for answer in answers] == [3] * len(names)
    again = await asyncio.gather(*(cluster.gateways["a"].send(name, 1) for name in names))
    assert all(is_repeat(answer) and place(answer) == 1 for answer in again)
    assert len(cluster.engine.ran) == 3 * len(names)


async def test_running_steps_end_before_the_next_owner_continues(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_sessions, "FETCH_S", 0.02)  # the new owner asks several times
    cluster.add("a", "b")
    names = [f"s-{n}" for n in range(30)]
    cluster.engine.may_run.clear()
    first = [asyncio.create_task(cluster.gateways["a"].send(name, 1)) for name in names]
    await until(lambda: len(cluster.engine.begun) == len(names))
    third = [asyncio.create_task(cluster.gateways["b"].send(name, 3)) for name in names]
    cluster.add("c")
    second = [asyncio.create_task(cluster.gateways["c"].send(name, 2)) for name in names]
    await asyncio.sleep(0.1)
    assert len(cluster.engine.begun) == len(names)  # no session continued while its first step ran
    monkeypatch.undo()
    await asyncio.sleep(0.1)
    cluster.engine.may_run.set()
    for tasks, expected in ((first, 1), (second, 2), (third, 3)):
        assert {place(answer) for answer in await asyncio.gather(*tasks)} == {expected}
    for name in names:
        assert [seq_no for session, seq_no in cluster.engine.ran if session == name] == [1, 2, 3]


async def test_a_gateway_with_an_older_list_waits_for_the_update(cluster: Cluster) -> None:
    cluster.add("a", "b")
    session = cluster.session_of("a")
    await cluster.gateways["a"].send(session, 1)
    behind = cluster.gateways["a"]
    members = [gateway.member for gateway in cluster.gateways.values()]
    cluster.gateways["b"].sessions.gateways_changed(members, cluster.revision + 1)
    sending = asyncio.create_task(cluster.gateways["b"].send(session, 2))
    await asyncio.sleep(0.1)
    assert not sending.done()
    behind.sessions.gateways_changed(members, cluster.revision + 1)
    assert place(await sending) == 2


async def test_streams_and_their_records_move_between_gateways(cluster: Cluster) -> None:
    cluster.add("a", "b")
    session = cluster.session_of("a")
    answers = await cluster.gateways["b"].stream(session, 1)
    assert [bytes(answer.outputs[0].data)[0] for answer in answers] == list(range(20))
    assert {place(answer) for answer in answers} == {1}
    again = await cluster.gateways["a"].stream(session, 1)
    assert len(again) == 20
    assert all(is_repeat(answer) for answer in again)
    assert cluster.engine.ran == [(session, 1)]


async def test_a_forwarded_stream_ends_with_its_caller_or_its_deadline(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add("a", "b")
    session = cluster.session_of("a")
    asking, owner = cluster.gateways["b"], cluster.gateways["a"]
    made = asking.follow(asking.ask(session, 1, 30.0))
    await anext(made)
    await made.aclose()
    await until(lambda: not any(peer.jobs for peer in owner.endpoint._peers.values()))
    monkeypatch.setattr(peers, "LATE_S", 0.0)
    cluster.engine.may_run.clear()
    made = asking.follow(asking.ask(session, 1, 0.1))
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        await anext(made)


async def test_deadlines_and_disconnects_reach_the_owner(cluster: Cluster) -> None:
    cluster.add("a", "b")
    session = cluster.session_of("a")
    await cluster.gateways["b"].send(f"{session}-warm", 1)  # the gateways know each other
    with pytest.raises(DeadlineExceeded, match="deadline passed"):
        await cluster.gateways["b"].send(session, 2, timeout_s=0.5)
    leaving = asyncio.create_task(cluster.gateways["b"].send(session, 2))
    owner = cluster.gateways["a"]
    await until(lambda: owner.runs.count_sessions()["waiting"] == 1)
    leaving.cancel()
    await until(lambda: owner.runs.count_sessions()["waiting"] == 0)


async def test_a_leaving_gateway_hands_its_sessions_to_the_others(cluster: Cluster) -> None:
    cluster.add("a", "b", "c")
    names = [f"s-{n}" for n in range(30)]
    for seq_no in (1, 2):
        await asyncio.gather(*(cluster.gateways["b"].send(name, seq_no) for name in names))
    cluster.engine.may_run.clear()
    running = [asyncio.create_task(cluster.gateways["a"].send(name, 3)) for name in names]
    await until(lambda: len(cluster.engine.begun) == 3 * len(names))
    waiting = [asyncio.create_task(cluster.gateways["b"].send(name, 4)) for name in names]
    leaver = cluster.gateways.pop("a")
    leaving = asyncio.create_task(leaver.sessions.leave(time.monotonic() + 30))
    await asyncio.sleep(0.05)
    assert not leaving.done()
    cluster.engine.may_run.set()
    await leaving
    assert leaver.runs.list_session_keys() == []
    with pytest.raises(Draining):
        await leaver.send(cluster.session_of("a"), 1)
    cluster.tell()
    assert [place(answer) for answer in await asyncio.gather(*running)] == [3] * len(names)
    assert [place(answer) for answer in await asyncio.gather(*waiting)] == [4] * len(names)
    again = await asyncio.gather(*(cluster.gateways["c"].send(name, 1) for name in names))
    assert all(is_repeat(answer) for answer in again)
    assert len(cluster.engine.ran) == 4 * len(names)
    await leaver.close()


@pytest.mark.parametrize("is_stateful", [False, True])
async def test_sessions_continue_with_the_block_that_replaces_theirs(cluster: Cluster, is_stateful: bool) -> None:
    cluster.add("a", "b")
    names = [f"s-{n}" for n in range(10)]
    old = block(is_stateful=is_stateful)
    successor = replace(old, block_id="blk-2", version="2")
    for gateway in cluster.gateways.values():
        gateway.block = old
    await asyncio.gather(*(cluster.gateways["a"].send(name, 1) for name in names))
    for gateway in cluster.gateways.values():
        gateway.runs.retire_block("blk", ModelNotReady("it is unloaded", reason="withdrawn"), successor)
        gateway.block = successor
    cluster.add("c")
    cluster.gateways["c"].block = successor
    # A gateway that joins only now has not seen the former block: it finds no record under the former id.
    for name in names if not cluster.has_store else [name for name in names if cluster.owner(name) != "c"]:
        if is_stateful:
            with pytest.raises(SessionError, match="another version has replaced the model"):
                await cluster.gateways["a"].send(name, 2)
        else:
            assert is_repeat(await cluster.gateways["b"].send(name, 1))
            assert place(await cluster.gateways["a"].send(name, 2)) == 2


async def test_after_an_owners_death_the_next_owner_continues_from_the_store(stored: Cluster) -> None:
    stored.add("a", "b", "c")
    session = stored.session_of("a")
    for seq_no in (1, 2):
        await stored.gateways["b"].send(session, seq_no)
    waiting = asyncio.create_task(stored.gateways["b"].send(session, 4))
    await until(lambda: stored.gateways["a"].runs.count_sessions()["waiting"] == 1)
    stored.kill("a")
    stored.tell()
    assert is_repeat(await stored.gateways["c"].send(session, 2))
    assert place(await stored.gateways["c"].send(session, 3)) == 3
    assert place(await waiting) == 4
    assert stored.engine.ran == [(session, seq_no) for seq_no in (1, 2, 3, 4)]


async def test_without_a_store_sessions_are_lost_with_their_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_sessions, "BEGIN_S", 1.0)
    cluster = Cluster(tmp_path)
    cluster.add("a", "b", "c")
    lost, kept = cluster.session_of("a"), cluster.session_of("b")
    for session in (lost, kept):
        await cluster.gateways["b"].send(session, 1)
    cluster.kill("a")
    cluster.tell()
    assert place(await cluster.gateways["c"].send(kept, 2)) == 2
    with pytest.raises(SessionError, match="its gateway is gone and no store had its record"):
        await cluster.gateways["b"].send(lost, 2)
    assert place(await cluster.gateways["c"].send(lost, 7, is_start=True)) == 1
    new = f"{lost}-new"
    later = asyncio.create_task(cluster.gateways["b"].send(new, 2))
    assert [place(await cluster.gateways["c"].send(new, 1)), place(await later)] == [1, 2]
    for gateway in cluster.gateways.values():
        gateway.block = block(is_stateful=True)
    stateful = next(f"t-{n}" for n in range(10_000) if cluster.gateways["b"].sessions._is_maybe_lost(f"t-{n}", 60.0))
    with pytest.raises(SessionError, match="is lost"):
        await cluster.gateways["b"].send(stateful, None)
    assert place(await cluster.gateways["b"].send(stateful, None, is_start=True)) == 1
    last = next(f"u-{n}" for n in range(10_000) if cluster.owner(f"u-{n}") == "c")
    cluster.kill("c")
    cluster.tell()
    with pytest.raises(SessionError, match="is lost"):
        await cluster.gateways["b"].send(last, 2)
    await cluster.close()


@pytest.mark.parametrize("is_idempotent", [True, False])
async def test_a_step_that_ran_as_its_owner_died_can_be_repeated(stored: Cluster, is_idempotent: bool) -> None:
    stored.add("a", "b", "c")
    for gateway in stored.gateways.values():
        gateway.block = block(is_idempotent)
    session = stored.session_of("a")
    stored.engine.may_run.clear()
    sending = asyncio.create_task(stored.gateways["b"].send(session, 1))
    await until(lambda: stored.engine.begun == [(session, 1)])
    stored.kill("a")
    stored.engine.may_run.set()
    stored.tell()
    if is_idempotent:
        assert place(await sending) == 1
    else:
        with pytest.raises(WorkerLost, match="whether it ran is not known"):
            await sending
        assert place(await stored.gateways["b"].send(session, 1)) == 1
    assert place(await stored.gateways["c"].send(session, 2)) == 2


async def test_without_a_number_a_request_is_not_sent_twice(stored: Cluster) -> None:
    stored.add("a", "b")
    session = stored.session_of("a")
    stored.engine.may_run.clear()
    sending = asyncio.create_task(stored.gateways["b"].send(session, None))
    await until(lambda: len(stored.engine.begun) == 1)
    stored.kill("a")
    stored.tell()
    with pytest.raises(GatewayLost, match="the request may or may not have run"):
        await sending


async def test_a_step_that_is_sent_again_is_unchanged(stored: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start mark that the owner sets for the worker must not be taken for the client's."""
    stored.add("a", "b")
    owner, asked = stored.gateways["a"], list[bool]()
    run = owner.runs.run

    async def refuse_once(block: BlockDescription, request: InferRequest, *more: Any) -> InferResponse:
        step = request.controls.session
        assert step is not None
        asked.append(step.is_start)
        step.is_start = True
        if len(asked) == 1:
            raise session_errors.make_session_moved_error(step.session_id)
        step.is_start = False
        return await run(block, request, *more)

    monkeypatch.setattr(owner.runs, "run", refuse_once)
    await owner.send(stored.session_of("a"), 1)
    assert asked == [False, False]


async def test_a_deposed_owner_runs_nothing(stored: Cluster) -> None:
    """The owner does not know that it was removed from the list; the store refuses its step."""
    stored.add("a", "b")
    session = stored.session_of("a")
    await stored.gateways["a"].send(session, 1)
    cut_off = stored.gateways.pop("a")
    stored.tell()
    assert place(await stored.gateways["b"].send(session, 2)) == 2
    ran = len(stored.engine.ran)
    late = asyncio.create_task(cut_off.send(session, 3, timeout_s=0.3))
    answer = await stored.gateways["b"].send(session, 3)
    assert place(answer) == 3
    await asyncio.gather(late, return_exceptions=True)
    assert stored.engine.ran[ran:] == [(session, 3)]
    await cut_off.close()


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_runs_twice_or_out_of_order_while_gateways_come_and_go(stored: Cluster, seed: int) -> None:
    rng = Random(seed)
    stored.add("a", "b", "c")
    names, steps = [f"s-{n}" for n in range(20)], 8
    numbers = iter(range(100))

    async def play(name: str) -> list[object]:
        async def insist(seq_no: int) -> object:
            while True:
                gateway = rng.choice(list(stored.gateways.values()))
                sending = asyncio.create_task(gateway.send(name, seq_no))
                gone = asyncio.create_task(gateway.is_gone.wait())
                await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
                if not gone.cancel():
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
                    continue
                return place(await sending)

        order = sorted(range(1, steps + 1), key=lambda n: n + rng.uniform(0, 3))
        return await asyncio.gather(*(insist(seq_no) for seq_no in order))

    async def churn() -> None:
        for _ in range(4):
            await asyncio.sleep(0.05)
            if len(stored.gateways) > 2 and rng.random() < 0.5:
                gone = stored.gateways.pop(rng.choice(sorted(stored.gateways)))
                stored.tell()
                await asyncio.sleep(0.05)
                await gone.close()
            else:
                stored.add(f"n-{next(numbers)}")

    churning = asyncio.create_task(churn())
    places = await asyncio.wait_for(asyncio.gather(*(play(name) for name in names)), 60)
    await churning
    assert [sorted(each, key=str) for each in places] == [list(range(1, steps + 1))] * len(names)
    for name in names:
        # Steps that ran as their gateway was removed from the list may run again, as after a worker's death; no
        # others may.
        ran = [seq_no for session, seq_no in stored.engine.ran if session == name]
        assert [seq_no for seq_no, before in zip(ran, [0, *ran], strict=False) if seq_no != before] == list(
            range(1, steps + 1)
        )
