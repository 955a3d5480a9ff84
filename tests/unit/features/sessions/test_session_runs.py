"""Sessions on an event loop: callers arrive, leave and return, and nothing is left behind."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from penstock.core.blocks import BlockDescription
from penstock.core.config import Limits
from penstock.core.errors import (
    DeadlineExceeded,
    Draining,
    EngineFailed,
    InternalError,
    ModelNotReady,
    QueueFull,
    SessionError,
    Unavailable,
    WorkerLost,
)
from penstock.core.requests import Controls, InferRequest, InferResponse, SessionStep, Timing
from penstock.core.settings import BlockSettings, Sessions
from penstock.core.tensors import Tensor
from penstock.features.sessions.session_runs import SessionRuns


def block(**settings: Any) -> BlockDescription:
    sessions = BlockSettings(sessions=Sessions(**settings))
    return BlockDescription("blk", "m", "1", "onnxruntime_onnx", "fp32", (), (), 8, 1, sessions)


class Engine:
    """A substitute for the dispatcher that runs requests when the test allows it, and records them."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int | None, bool]] = []
        self.running = 0
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.failures: list[Exception] = []  # for the next runs

    async def run(self, block: BlockDescription, request: InferRequest, deadline: float) -> InferResponse:
        step = request.controls.session
        assert step is not None
        self.running += 1
        try:
            await self.may_run.wait()
            await asyncio.sleep(0)
            if self.failures:
                raise self.failures.pop(0)
            self.ran.append((step.session_id, step.seq_no, step.is_start))
            step.home = b"worker"
            return InferResponse(request.model, "", request.request_id, request.inputs, Timing(compute_ns=5), {"p": 1})
        finally:
            self.running -= 1

    def numbers(self) -> list[int | None]:
        return [seq_no for _, seq_no, _ in self.ran]


class Bench:
    def __init__(self, runs: SessionRuns, engine: Engine) -> None:
        self.runs = runs
        self.engine = engine
        self.block = block()

    async def send(
        self,
        seq_no: int | None = None,
        session: str = "s",
        text: str = "",
        request_id: str = "",
        timeout_s: float = 30.0,
        **flags: Any,
    ) -> InferResponse:
        data = text.encode()
        step = SessionStep(session, seq_no, **flags)
        request = InferRequest("m", [Tensor("x", "UINT8", (len(data),), data)], request_id=request_id)
        request.controls = Controls(session=step)
        return await self.runs.run(self.block, request, time.monotonic() + timeout_s, self.engine.run)

    def start(self, *args: Any, **kwargs: Any) -> asyncio.Task[InferResponse]:
        return asyncio.create_task(self.send(*args, **kwargs))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Fail if the loop reported a problem, such as an exception that nobody retrieved."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    runs, engine = SessionRuns(Limits()), Engine()
    yield Bench(runs, engine)
    engine.may_run.set()
    await runs.close()
    await asyncio.sleep(0)
    gc.collect()
    assert reported == []
    assert engine.running == 0
    assert runs._callers == {}
    assert runs._tasks == {}


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def text(response: InferResponse) -> str:
    return bytes(response.outputs[0].data).decode()


async def test_steps_run_in_order_and_report_their_place(bench: Bench) -> None:
    answers = await asyncio.gather(*(bench.send(n, text=str(n), request_id=f"r{n}") for n in (4, 2, 1, 3)))
    assert bench.engine.ran == [("s", 1, True), ("s", 2, False), ("s", 3, False), ("s", 4, False)]
    assert [text(answer) for answer in answers] == ["4", "2", "1", "3"]
    assert [answer.request_id for answer in answers] == ["r4", "r2", "r1", "r3"]
    assert [answer.parameters for answer in answers] == [{"p": 1, "session_step": n} for n in (4, 2, 1, 3)]


async def test_without_numbers_steps_run_in_order_of_arrival(bench: Bench) -> None:
    answers = await asyncio.gather(
        bench.send(text="a", is_start=True), bench.send(text="b"), bench.send(text="c", is_end=True)
    )
    assert [(text(answer), answer.parameters["session_step"]) for answer in answers] == [("a", 1), ("b", 2), ("c", 3)]
    with pytest.raises(SessionError, match="has ended"):
        await bench.send(text="d")


async def test_a_repeat_gets_the_answer_under_its_own_id(bench: Bench) -> None:
    first = await bench.send(1, text="a", request_id="one")
    first.version = "changed by an edge"
    again = await bench.send(1, text="other", request_id="two")
    assert (text(again), again.request_id, again.version) == ("a", "two", "")
    assert again.parameters == {"p": 1, "session_step": 1, "session_repeat": True}
    assert again.timing == Timing()
    assert bench.engine.numbers() == [1]
    assert bench.runs.count_sessions() == {"open": 1, "waiting": 0, "repeats": 1}


async def test_two_callers_of_a_running_step_share_it(bench: Bench) -> None:
    one, two = await asyncio.gather(bench.send(1, text="a", request_id="1"), bench.send(1, text="a", request_id="2"))
    assert (one.request_id, two.request_id) == ("1", "2")
    assert one.parameters == two.parameters == {"p": 1, "session_step": 1}
    assert bench.engine.numbers() == [1]


async def test_a_step_continues_without_its_caller(bench: Bench) -> None:
    bench.engine.may_run.clear()
    caller = bench.start(1, text="a")
    await settle()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    assert bench.engine.running == 1
    bench.engine.may_run.set()
    again = await bench.send(1, text="a")
    assert text(again) == "a"
    assert bench.engine.numbers() == [1]


async def test_a_waiting_step_is_cancelled_with_its_caller(bench: Bench) -> None:
    waiting = bench.start(2)
    await settle()
    assert bench.runs.count_sessions() == {"open": 1, "waiting": 1, "repeats": 0}
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert bench.runs.count_sessions() == {"open": 0, "waiting": 0, "repeats": 0}
    await bench.send(1)
    assert bench.engine.numbers() == [1]


async def test_each_caller_gets_its_own_copy_of_a_failure(bench: Bench) -> None:
    bench.engine.failures = [EngineFailed("no", why="x"), QueueFull("full")]
    outcomes = await asyncio.gather(bench.send(1), bench.send(1), return_exceptions=True)
    again = (await asyncio.gather(bench.send(1), return_exceptions=True))[0]
    errors = [*outcomes, again]
    assert all(isinstance(error, EngineFailed) and error.fields == {"why": "x"} for error in errors)
    assert len({id(error) for error in errors}) == 3
    with pytest.raises(QueueFull):
        await bench.send(2)
    answer = await bench.send(2)
    assert "session_repeat" not in answer.parameters
    assert answer.parameters["session_step"] == 2


async def test_a_bug_is_raised_and_the_step_can_be_repeated(bench: Bench) -> None:
    bench.engine.failures = [ZeroDivisionError("a bug")]
    with pytest.raises(InternalError):
        await bench.send(1)
    assert (await bench.send(1)).parameters["session_step"] == 1


async def test_a_waiting_caller_gets_an_error_at_its_deadline(bench: Bench) -> None:
    patient = bench.start(2)
    with pytest.raises(DeadlineExceeded, match="seq_no 3 of session 's' waited for seq_no 1"):
        await bench.send(3, timeout_s=0.05)
    with pytest.raises(DeadlineExceeded, match="seq_no 4 of session 's' waited for seq_no 1"):
        await bench.send(4, timeout_s=0.02)
    await bench.send(1)
    await patient
    assert bench.engine.numbers() == [1, 2]


async def test_a_stateful_session_is_lost_with_its_worker(bench: Bench) -> None:
    bench.block = block(is_stateful=True)
    await bench.send(1)
    bench.runs.worker_lost(b"worker", ["blk"])
    with pytest.raises(SessionError, match="its worker is gone"):
        await bench.send(2)
    await bench.send(1, text="new", is_start=True)
    bench.engine.failures = [WorkerLost("died")]
    with pytest.raises(WorkerLost):
        await bench.send(2)
    with pytest.raises(SessionError, match="its worker is gone"):
        await bench.send(2)


async def test_idle_sessions_are_removed(bench: Bench) -> None:
    bench.block = block(idle_s=0.001)
    await bench.send(1)
    while bench.runs.count_sessions()["open"]:
        await asyncio.sleep(0.001)
        bench.runs.tick()


async def test_callers_waiting_for_a_removed_block_get_its_error(bench: Bench) -> None:
    waiting = bench.start(2)
    await settle()
    bench.runs.retire_block("blk", ModelNotReady("unloaded"))
    with pytest.raises(ModelNotReady, match="unloaded"):
        await waiting


async def test_draining_finishes_steps_that_can_run(bench: Bench) -> None:
    bench.engine.may_run.clear()
    tasks = [bench.start(n, name) for name, n in (("a", 1), ("a", 2), ("a", 4), ("b", 2))]
    await settle()
    bench.runs.drain()
    with pytest.raises(Draining):
        await tasks[3]
    bench.engine.may_run.set()
    assert [(await task).parameters["session_step"] for task in tasks[:2]] == [1, 2]
    with pytest.raises(Draining):
        await tasks[2]


async def test_closing_ends_all_steps(bench: Bench) -> None:
    bench.engine.may_run.clear()
    abandoned = bench.start(1, "left")
    tasks = [bench.start(n, name) for name, n in (("a", 1), ("a", 2), ("b", 2))]
    await settle()
    abandoned.cancel()
    tasks.append(bench.start(1, "just now"))
    await asyncio.sleep(0)  # its step has a task that has not started
    await bench.runs.close()
    outcomes = await asyncio.gather(abandoned, *tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, *[Draining] * 4]
    with pytest.raises(Draining):
        await bench.send(1, "later")


async def test_every_step_runs_once_and_in_order_despite_cancellation_at_any_point(bench: Bench) -> None:
    """Callers arrive in any order, leave at any time and return until they have their answer."""
    rng = Random(7)
    steps = 12

    async def insist(session: str, seq_no: int) -> InferResponse:
        while True:
            task = bench.start(seq_no, session, text=f"{session}-{seq_no}")
            for _ in range(rng.choice([0, 1, 2, 3, 5, 8, 40])):
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                task.cancel()
            try:
                return await task
            except asyncio.CancelledError:
                continue
            except Unavailable:
                continue

    async def break_down() -> None:
        for _ in range(200):
            await asyncio.sleep(0)
            if rng.random() < 0.1:
                bench.engine.failures.append(Unavailable("nobody"))

    sent = [(f"s{n}", seq_no) for n in range(20) for seq_no in range(1, steps + 1)]
    rng.shuffle(sent)
    answers, _ = await asyncio.gather(asyncio.gather(*(insist(*each) for each in sent)), break_down())
    for (session, seq_no), answer in zip(sent, answers, strict=True):
        assert text(answer) == f"{session}-{seq_no}"
        assert answer.parameters["session_step"] == seq_no
    for name in {session for session, _ in sent}:
        assert [seq for session, seq, _ in bench.engine.ran if session == name] == list(range(1, steps + 1))
    assert bench.runs.count_sessions()["waiting"] == 0
