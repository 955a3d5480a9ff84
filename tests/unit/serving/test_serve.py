"""The order of a request's steps, and that each request is counted, logged and released, however it ends."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.core.blocks import BlockDescription, BlockState, BlockView
from penstock.core.config import AccessSettings, CacheSettings, Limits, QuotaSettings, TelemetrySettings
from penstock.core.errors import (
    BUG_MESSAGE,
    Draining,
    EngineFailed,
    InternalError,
    InvalidRequest,
    ModelNotReady,
    NoMatch,
    PenstockError,
    QueueFull,
    RateLimited,
    RequestTooLarge,
    SessionError,
    UnknownModel,
)
from penstock.core.principals import KeyLimits, Principal
from penstock.core.requests import NO_CONTROLS, InferRequest, InferResponse, PacketFields, Parameter, Timing
from penstock.core.settings import BlockSettings, Routing, Timeouts
from penstock.core.tensors import Tensor
from penstock.features.cache.cache_key import CacheKeys
from penstock.features.cache.responses import ResponseCache
from penstock.features.cache.stores.cache_store import open_store
from penstock.features.limits.meter import Meter
from penstock.features.quotas.quota_check import QuotaCheck
from penstock.features.sessions.ordered_sessions import OrderedSessions
from penstock.features.sessions.session_runs import SessionRuns
from penstock.router.dispatcher import Dispatcher
from penstock.serving.admission import Admission
from penstock.serving.resolve import WITHDRAWN, Resolver
from penstock.serving.serve import Serving
from penstock.storage.limits.memory_limits import MemoryLimitStore
from penstock.telemetry.metrics import CacheMetrics, LimitMetrics, ServingMetrics
from penstock.telemetry.traces import Traces

MAX_ROWS = 4
REQUEST_S = 7.0  # the models' own deadline
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def block(model: str, max_batch_size: int = 8, **settings: Any) -> BlockDescription:
    chosen = BlockSettings(timeouts=Timeouts(request_s=REQUEST_S), **settings)
    return BlockDescription(
        f"blk-{model}", model, "3", "onnxruntime_onnx", "fp32", (), (), max_batch_size, 1, chosen, fingerprint="f"
    )


BLOCKS = (
    block("plain"),
    block("unbatched", max_batch_size=0),
    block("patient", priorities={"queue": {"allow_override": True}}),
    block("kept", cache={"enabled": True}),
    block("talker", is_decoupled=True),
    block("stateful_talker", sessions={"is_stateful": True}, is_decoupled=True),
)

WAYS = [("serve", "plain"), ("serve", "kept"), ("stream", "plain"), ("stream", "talker")]


def ask(model: str = "plain", rows: int = 1, **more: Any) -> InferRequest:
    tensor = Tensor("x", "UINT8", (rows, 1), bytes(rows))
    return InferRequest(model, [tensor], **{"request_id": "r-1", "size_bytes": 10, **more})


class FakeDispatcher:
    """Returns the inputs, `answers` times for a stream; or fails, or waits at the gate."""

    def __init__(self) -> None:
        self.ran: list[tuple[BlockDescription, InferRequest, float]] = []
        self.error: Exception | None = None
        self.failing: set[str] | None = None  # blocks that get the error; None: all
        self.answers = 3
        self.failing_answer = 0  # of a stream, from 0: the answer that gets the error
        self.parameters: dict[str, Parameter] = {}
        self.is_called = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed_streams = 0

    def get_routing(self, described: BlockDescription) -> Routing:
        return described.settings.routing

    async def run(self, described: BlockDescription, request: InferRequest, deadline: float) -> InferResponse:
        if request.answers is None:
            return await self._answer(described, request, deadline)
        try:
            for index in range(self.answers - 1):
                answer = await self._answer(described, request, deadline, index)
                assert request.answers.put(replace(answer, is_final=False))
            return await self._answer(described, request, deadline, self.answers - 1)
        finally:
            self.closed_streams += 1

    async def _answer(
        self, described: BlockDescription, request: InferRequest, deadline: float, index: int = 0
    ) -> InferResponse:
        self.ran.append((described, request, deadline))
        self.is_called.set()
        await self.gate.wait()
        is_failing = self.failing is None or described.block_id in self.failing
        if self.error is not None and is_failing and index >= self.failing_answer:
            raise self.error
        timing = Timing(compute_ns=1_000, batch_rows=2)
        return InferResponse(request.model, "", request.request_id, request.inputs, timing, dict(self.parameters))


class FakeSearch:
    """Returns block ids, or raises errors, in the given order."""

    def __init__(self) -> None:
        self.outcomes: list[str | Exception] = []
        self.asked: list[tuple[str, float]] = []

    async def resolve(self, request: InferRequest, deadline: float) -> str:
        assert request.packet is not None
        self.asked.append((request.packet.query_parameters, deadline))
        await asyncio.sleep(0)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Bed:
    def __init__(self, folder: Path) -> None:
        self.registry = CollectorRegistry()
        self.admission = Admission(Limits(max_rows=MAX_ROWS, max_message_bytes=1024))
        self.resolver = Resolver()
        self.resolver.set_views([BlockView(b.block_id, b.model, b.version, BlockState.READY, "") for b in BLOCKS])
        self.resolver.set_held_blocks({b.block_id: b for b in BLOCKS})
        settings = CacheSettings()
        self.cache = ResponseCache(open_store(settings, "g-0", folder), settings, CacheMetrics(self.registry))
        self.sessions = SessionRuns(Limits())
        self.dispatcher = FakeDispatcher()
        self.spans = InMemorySpanExporter()
        self.metrics = ServingMetrics(self.registry)
        self.now = 0.0
        self.meter = Meter(MemoryLimitStore(lambda: self.now), AccessSettings(), LimitMetrics(self.registry))
        self.quotas = QuotaSettings()
        self.search = FakeSearch()
        self.serving = self.build(Traces(TelemetrySettings(), "test"))

    def build(self, traces: Traces) -> Serving:
        dispatcher = cast(Dispatcher, self.dispatcher)
        sessions = OrderedSessions("g-0", self.sessions)
        quotas = QuotaCheck(MemoryLimitStore(lambda: self.now), self.quotas, LimitMetrics(CollectorRegistry()))
        return Serving(
            self.admission,
            self.resolver,
            self.cache,
            sessions,
            dispatcher,
            self.metrics,
            traces,
            self.meter,
            quotas,
            self.search,
        )

    async def stream(self, request: InferRequest) -> list[InferResponse]:
        return [answer async for answer in self.serving.stream(request)]

    async def send(self, way: str, request: InferRequest) -> None:
        await (self.serving.serve(request) if way == "serve" else self.stream(request))

    def count(self, model: str, code: str, protocol: str = "grpc") -> float:
        self.serving.plans.tallies.flush()
        labels = {"model": model, "version": "3" if model else "", "protocol": protocol, "code": code}
        return self.registry.get_sample_value("penstock_requests_total", labels) or 0.0

    def counted(self) -> float:
        """Return the number of all requests, whatever their outcome."""
        self.serving.plans.tallies.flush()
        found = self.registry.collect()
        return sum(s.value for metric in found for s in metric.samples if s.name == "penstock_requests_total")

    def refusals(self, reason: str) -> float:
        return self.registry.get_sample_value("penstock_refusals_total", {"reason": reason}) or 0.0

    def timings(self, name: str, model: str) -> float:
        self.serving.plans.tallies.flush()
        return self.registry.get_sample_value(f"penstock_{name}_count", {"model": model, "version": "3"}) or 0.0


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    """Fail if a test leaves a request admitted."""
    bed = Bed(tmp_path)
    yield bed
    await bed.sessions.close()
    await bed.cache.close()
    assert (bed.admission.inflight_requests, bed.admission.inflight_bytes) == (0, 0)


# --- the order


@pytest.mark.parametrize(("way", "model"), WAYS)
async def test_each_step_refuses_before_the_next_one_runs(bed: Bed, way: str, model: str) -> None:
    """Start with a request that is wrong in every way, and correct it step by step."""
    request = ask("nobody", rows=MAX_ROWS + 1, size_bytes=2000, parameters={"priority": "high"})
    bed.admission.is_draining = True
    with pytest.raises(Draining):
        await bed.send(way, request)
    bed.admission.is_draining = False
    with pytest.raises(RequestTooLarge, match="2000 bytes"):
        await bed.send(way, request)
    request.size_bytes = 10
    with pytest.raises(UnknownModel, match="nobody"):
        await bed.send(way, request)
    request.model = model
    with pytest.raises(RequestTooLarge, match="5 rows"):
        await bed.send(way, request)
    request.inputs = ask().inputs
    with pytest.raises(InvalidRequest, match="priority"):
        await bed.send(way, request)
    assert bed.dispatcher.ran == []
    request.parameters = {}
    await bed.send(way, request)
    assert bed.dispatcher.ran[0][1] is request


async def test_an_answer_has_the_version_that_gave_it(bed: Bed) -> None:
    assert (await bed.serving.serve(ask())).version == "3"
    assert [answer.version for answer in await bed.stream(ask("talker"))] == ["3", "3", "3"]


def ask_by_query(**fields: Any) -> InferRequest:
    return ask("", packet=PacketFields("s-1", query_parameters="{}"), **fields)


@pytest.mark.parametrize(("way", "model"), WAYS)
async def test_a_search_selects_the_block_of_a_request_with_a_query(bed: Bed, way: str, model: str) -> None:
    bed.search.outcomes = [f"blk-{model}"]
    await bed.send(way, ask_by_query(timeout_s=3.0))
    assert bed.dispatcher.ran[0][0].block_id == f"blk-{model}"
    assert bed.search.asked[0][1] == pytest.approx(time.monotonic() + 3.0, abs=3.0)
    assert bed.count(model, "ok") == 1


async def test_a_search_without_a_result_fails_the_request_after_admission(bed: Bed) -> None:
    bed.search.outcomes = [NoMatch("none of 2 blocks"), "blk-gone"]
    with pytest.raises(NoMatch):
        await bed.serving.serve(ask_by_query())
    assert bed.count("", "no_match") == 1
    with pytest.raises(UnknownModel):
        await bed.serving.serve(ask_by_query())
    bed.admission.is_draining = True
    with pytest.raises(Draining):
        await bed.serving.serve(ask_by_query())
    assert bed.dispatcher.ran == []
    assert len(bed.search.asked) == 2


async def test_a_request_whose_found_block_was_withdrawn_searches_again(bed: Bed) -> None:
    bed.search.outcomes = ["blk-plain", "blk-unbatched"]
    bed.dispatcher.error = ModelNotReady("version 3 is unloaded", reason=WITHDRAWN)
    bed.dispatcher.failing = {"blk-plain"}
    await bed.serving.serve(ask_by_query())
    assert [block.block_id for block, *_ in bed.dispatcher.ran] == ["blk-plain", "blk-unbatched"]
    bed.search.outcomes = ["blk-plain", "blk-plain"]
    with pytest.raises(ModelNotReady):
        await bed.serving.serve(ask_by_query())


@pytest.mark.parametrize(("way", "model"), WAYS)
async def test_a_request_whose_version_was_removed_is_run_by_the_next_version(bed: Bed, way: str, model: str) -> None:
    old = bed.resolver.resolve(model, "")
    new = replace(old, block_id="blk-new", version="4")
    bed.dispatcher.error = ModelNotReady("version 3 is unloaded", reason=WITHDRAWN)
    bed.dispatcher.gate.clear()
    asked = asyncio.create_task(bed.send(way, ask(model)))
    await bed.dispatcher.is_called.wait()
    bed.resolver.set_views(
        [
            BlockView(old.block_id, model, "3", BlockState.UNLOADED, ""),
            BlockView("blk-new", model, "4", BlockState.READY, ""),
        ]
    )
    bed.resolver.set_held_blocks({"blk-new": new})
    bed.dispatcher.failing = {old.block_id}
    bed.dispatcher.gate.set()
    await asked
    assert [ran.version for ran, _, _ in bed.dispatcher.ran[:2]] == ["3", "4"]


@pytest.mark.parametrize(("asked", "reason"), [("3", WITHDRAWN), ("", "other")])
async def test_a_request_for_one_version_or_with_another_error_fails(bed: Bed, asked: str, reason: str) -> None:
    bed.dispatcher.error = ModelNotReady("it went", reason=reason)
    with pytest.raises(ModelNotReady, match="it went"):
        await bed.serving.serve(ask(version=asked))
    assert len(bed.dispatcher.ran) == 1


async def test_rows_of_a_model_without_a_batch_dimension_are_not_limited(bed: Bed) -> None:
    await bed.serving.serve(ask("unbatched", rows=MAX_ROWS + 1))
    assert len(bed.dispatcher.ran) == 1


async def test_a_request_stays_admitted_while_it_runs(bed: Bed) -> None:
    bed.dispatcher.gate.clear()
    running = asyncio.create_task(bed.send("serve", ask(size_bytes=99)))
    await bed.dispatcher.is_called.wait()
    assert (bed.admission.inflight_requests, bed.admission.inflight_bytes) == (1, 99)
    bed.dispatcher.gate.set()
    await running


async def test_a_requests_controls_are_passed_on(bed: Bed) -> None:
    await bed.serving.serve(ask())
    await bed.serving.serve(ask("kept", parameters={"cache": "bypass"}))
    assert [request.controls.cache for _, request, _ in bed.dispatcher.ran] == ["use", "bypass"]
    assert bed.dispatcher.ran[0][1].controls is NO_CONTROLS


# --- deadlines


@pytest.mark.parametrize("way", ["serve", "stream"])
@pytest.mark.parametrize(
    ("caller_s", "parameters", "expected_s"),
    [
        pytest.param(None, {}, REQUEST_S, id="the model's"),
        pytest.param(50.0, {}, 50.0, id="the caller's"),
        pytest.param(None, {"timeout": 2_000_000}, 2.0, id="the parameter, in microseconds"),
        pytest.param(1.0, {"timeout": 2_000_000}, 1.0, id="the parameter lengthens nothing"),
        pytest.param(None, {"timeout": 0}, REQUEST_S, id="a parameter of 0 is none"),
        pytest.param(None, {"timeout": "2"}, REQUEST_S, id="a text is none"),
    ],
)
async def test_the_shortest_deadline_applies(
    bed: Bed, way: str, caller_s: float | None, parameters: dict[str, Parameter], expected_s: float
) -> None:
    before = time.monotonic()
    request = ask("plain" if way == "serve" else "talker", timeout_s=caller_s, parameters=parameters)
    await bed.send(way, request)
    deadline = bed.dispatcher.ran[0][2]
    assert before + expected_s <= deadline <= time.monotonic() + expected_s


async def test_a_timeout_for_queues_alone_keeps_the_deadline(bed: Bed) -> None:
    before = time.monotonic()
    await bed.serving.serve(ask("patient", parameters={"timeout": 2_000_000}))
    _, request, deadline = bed.dispatcher.ran[0]
    assert deadline >= before + REQUEST_S
    assert request.controls.queue_timeout_s == 2.0


# --- cache and sessions


async def test_a_cached_answer_runs_nothing(bed: Bed) -> None:
    miss = await bed.serving.serve(ask("kept"))
    hit = await bed.serving.serve(ask("kept", request_id="r-2"))
    assert len(bed.dispatcher.ran) == 1
    assert "cache" not in miss.parameters
    assert (hit.parameters["cache"], hit.request_id, hit.version) == ("hit", "r-2", "3")
    assert bed.count("kept", "ok") == 2


async def test_the_key_of_a_miss_is_computed_once(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[InferRequest] = []
    make_key = CacheKeys.compute_key

    def counted(maker: CacheKeys, request: InferRequest) -> bytes:
        digested.append(request)
        return make_key(maker, request)

    monkeypatch.setattr(CacheKeys, "compute_key", counted)
    await bed.serving.serve(ask("kept"))
    assert len(digested) == 1


async def test_a_stream_is_resolved_once(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[str] = []
    choose = bed.resolver.choose

    def counted(request: InferRequest) -> BlockDescription:
        resolved.append(request.model)
        return choose(request)

    monkeypatch.setattr(bed.resolver, "choose", counted)
    await bed.stream(ask("talker"))
    assert resolved == ["talker"]
    async with aclosing(bed.serving.stream(ask("talker"), bed.resolver.resolve("talker", ""))) as answers:
        assert len([answer async for answer in answers]) == 3
    await bed.serving.serve(ask("plain"), bed.resolver.resolve("plain", ""))
    assert resolved == ["talker"]  # the others by the caller, and not again here


async def test_identical_requests_in_flight_share_one_run(bed: Bed) -> None:
    answers = await asyncio.gather(*(bed.serving.serve(ask("kept", request_id=f"r-{n}")) for n in range(3)))
    assert len(bed.dispatcher.ran) == 1
    assert [answer.request_id for answer in answers] == ["r-0", "r-1", "r-2"]
    assert bed.count("kept", "ok") == 3


@pytest.mark.parametrize("model", ["plain", "kept"])
async def test_a_request_of_an_ordered_session_is_not_cached(bed: Bed, model: str) -> None:
    steps = [ask(model, parameters={"session_id": "s", "seq_no": number}) for number in (2, 1)]
    answers = await asyncio.gather(*(bed.serving.serve(step) for step in steps))
    assert [answer.parameters for answer in answers] == [{"session_step": 2}, {"session_step": 1}]
    ran = [request.controls.session for _, request, _ in bed.dispatcher.ran]
    assert [step and step.seq_no for step in ran] == [1, 2]
    again = await bed.serving.serve(ask(model, parameters={"session_id": "s", "seq_no": 2}))
    assert again.parameters == {"session_step": 2, "session_repeat": True}
    assert len(bed.dispatcher.ran) == 2


async def test_the_end_of_a_session_is_published(bed: Bed) -> None:
    await bed.serving.serve(ask(parameters={"session_id": "s", "seq_no": 1, "sequence_end": True}))
    with pytest.raises(SessionError):
        await bed.serving.serve(ask(parameters={"session_id": "s", "seq_no": 2}))
    assert bed.count("plain", "session_error") == 1


# --- decoupled models


async def test_one_answer_of_a_decoupled_model_is_refused(bed: Bed) -> None:
    with pytest.raises(InvalidRequest, match=r"model 'talker' may give many answers.*ModelStreamInfer"):
        await bed.serving.serve(ask("talker"))
    assert bed.dispatcher.ran == []
    assert bed.count("talker", "invalid_request") == 1


async def test_a_stream_returns_every_answer_and_counts_as_one_request(bed: Bed) -> None:
    answers = await bed.stream(ask("talker", protocol="grpc-stream"))
    assert [answer.is_final for answer in answers] == [False, False, True]
    assert bed.count("talker", "ok", "grpc-stream") == 1
    assert bed.counted() == 1
    assert bed.dispatcher.closed_streams == 1


@pytest.mark.parametrize("model", ["plain", "kept"])
async def test_a_stream_of_another_model_has_one_answer(bed: Bed, model: str) -> None:
    (answer,) = await bed.stream(ask(model))
    assert answer.is_final
    assert bed.count(model, "ok") == 1
    assert bed.dispatcher.closed_streams == 0


async def test_a_session_id_alone_has_no_order_and_no_record(bed: Bed) -> None:
    session: dict[str, Parameter] = {"session_id": "s"}
    assert (await bed.serving.serve(ask(parameters=session))).parameters == {}
    assert [answer.parameters for answer in await bed.stream(ask("talker", parameters=session))] == [{}] * 3
    assert bed.sessions.count_sessions()["open"] == 0


@pytest.mark.parametrize("model", ["talker", "stateful_talker"])
async def test_a_streams_answers_are_one_step_of_their_session(bed: Bed, model: str) -> None:
    ordered: dict[str, Parameter] = {"session_id": "s", "seq_no": 1}
    first = await bed.stream(ask(model, parameters=ordered))
    assert [(answer.parameters, answer.is_final) for answer in first] == [
        ({"session_step": 1}, False),
        ({"session_step": 1}, False),
        ({"session_step": 1}, True),
    ]
    again = await bed.stream(ask(model, parameters=ordered))
    assert [answer.parameters for answer in again] == [{"session_step": 1, "session_repeat": True}] * 3
    assert len(bed.dispatcher.ran) == 3
    second = await bed.stream(ask(model, parameters={"session_id": "s", "seq_no": 2}))
    assert {answer.parameters["session_step"] for answer in second} == {2}


async def test_a_stream_of_an_unknown_model_counts_once(bed: Bed) -> None:
    with pytest.raises(UnknownModel):
        await bed.stream(ask("nobody"))
    assert bed.count("", "unknown_model") == 1
    assert bed.counted() == 1


async def test_a_stream_stays_admitted_until_its_last_answer(bed: Bed) -> None:
    async with aclosing(bed.serving.stream(ask("talker"))) as answers:
        await anext(answers)
        assert bed.admission.inflight_requests == 1
        async for _ in answers:
            assert bed.admission.inflight_requests == 1
    assert bed.admission.inflight_requests == 0


# --- every end: counted, logged, released


@pytest.mark.parametrize(("way", "model"), WAYS)
async def test_an_answer_is_counted_and_timed_and_not_logged(bed: Bed, way: str, model: str) -> None:
    with capture_logs() as logs:
        await bed.send(way, ask(model, protocol="rest"))
    assert bed.count(model, "ok", "rest") == 1
    assert [bed.timings(name, model) for name in ("request_seconds", "admit_seconds", "reply_seconds")] == [1, 1, 1]
    assert logs == []


@pytest.mark.parametrize(("way", "model"), WAYS)
async def test_a_failure_is_counted_by_its_code_and_logged_once(bed: Bed, way: str, model: str) -> None:
    bed.dispatcher.error = EngineFailed("it broke")
    with capture_logs() as logs, pytest.raises(EngineFailed):
        await bed.send(way, ask(model))
    assert bed.count(model, "engine_failed") == 1
    assert bed.counted() == 1
    assert bed.timings("request_seconds", model) == 0
    told = {"request_id": "r-1", "model": model, "code": "engine_failed", "error": "it broke"}
    assert logs == [{"event": "request_failed", "log_level": "info", **told}]


@pytest.mark.parametrize(("way", "model"), WAYS)
async def test_a_refusal_is_counted_by_its_reason_and_not_logged(bed: Bed, way: str, model: str) -> None:
    bed.dispatcher.error = QueueFull("too many wait")
    with capture_logs() as logs, pytest.raises(QueueFull):
        await bed.send(way, ask(model))
    assert (bed.count(model, "queue_full"), bed.refusals("queue_full")) == (1, 1)
    assert logs == []


async def test_an_unknown_name_does_not_become_a_label(bed: Bed) -> None:
    with capture_logs() as logs, pytest.raises(UnknownModel):
        await bed.serving.serve(ask("nobody"))
    assert bed.count("", "unknown_model") == 1
    assert logs[0]["model"] == "nobody"


@pytest.mark.parametrize(("way", "model"), WAYS)
async def test_a_caller_that_leaves_is_counted_and_logged(bed: Bed, way: str, model: str) -> None:
    bed.dispatcher.gate.clear()
    running = asyncio.create_task(bed.send(way, ask(model)))
    await bed.dispatcher.is_called.wait()
    with capture_logs() as logs:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    assert bed.count(model, "cancelled") == 1
    assert [(entry["code"], entry["error"]) for entry in logs] == [("cancelled", "the caller left")]
    assert bed.admission.inflight_requests == 0


async def test_closing_a_stream_early_ends_its_run(bed: Bed) -> None:
    answers = bed.serving.stream(ask("talker"))
    await anext(answers)
    with capture_logs() as logs:
        await answers.aclose()
    assert bed.dispatcher.closed_streams == 1
    assert bed.count("talker", "cancelled") == 1
    assert [entry["error"] for entry in logs] == ["the caller left"]


async def test_a_stream_that_fails_between_answers_is_a_failure(bed: Bed) -> None:
    bed.dispatcher.error, bed.dispatcher.failing_answer = EngineFailed("no more"), 1
    answers = bed.serving.stream(ask("talker"))
    await anext(answers)
    with pytest.raises(EngineFailed):
        await anext(answers)
    assert (bed.count("talker", "engine_failed"), bed.count("talker", "ok")) == (1, 0)
    assert bed.dispatcher.closed_streams == 1


@pytest.mark.parametrize(("way", "model"), WAYS)
async def test_a_bug_is_logged_and_counted_and_reported_without_details(bed: Bed, way: str, model: str) -> None:
    bed.dispatcher.error = ZeroDivisionError("a secret")
    with capture_logs() as logs, pytest.raises(InternalError) as caught:
        await bed.send(way, ask(model))
    assert str(caught.value) == BUG_MESSAGE
    assert bed.count(model, "internal") == 1
    assert bed.counted() == 1
    (told,) = logs
    assert (told["event"], told["log_level"], told["where"], told["request_id"]) == ("bug", "error", "grpc", "r-1")
    assert told["exc_info"] is bed.dispatcher.error


async def test_an_exception_in_serving_itself_is_a_bug(bed: Bed) -> None:
    request = ask()
    request.parameters = cast(dict[str, Parameter], 5)
    with capture_logs() as logs, pytest.raises(InternalError):
        await bed.serving.serve(request)
    assert bed.count("plain", "internal") == 1
    assert logs[0]["event"] == "bug"


async def test_an_internal_error_of_a_worker_is_a_failure_like_others(bed: Bed) -> None:
    bed.dispatcher.error = InternalError("preparing the request failed")
    with capture_logs() as logs, pytest.raises(InternalError, match="preparing"):
        await bed.serving.serve(ask())
    assert [entry["event"] for entry in logs] == ["request_failed"]


@pytest.mark.parametrize(
    ("error", "refused"), [(InvalidRequest("what is this?"), 0.0), (RequestTooLarge("too large"), 1.0)]
)
def test_refusals_of_endpoints_are_counted(bed: Bed, error: PenstockError, refused: float) -> None:
    bed.serving.count_rejected("websocket", error)
    labels = {"model": "", "version": "", "protocol": "websocket", "code": error.code}
    assert bed.registry.get_sample_value("penstock_requests_total", labels) == 1
    assert bed.refusals(error.code) == refused


# --- traces


async def test_without_tracing_there_are_no_spans(bed: Bed) -> None:
    await bed.serving.serve(ask(traceparent=TRACE))
    assert bed.dispatcher.ran[0][1].traceparent == TRACE
    assert not bed.serving.is_traced


@pytest.fixture
def traced(bed: Bed) -> Iterator[Bed]:
    traces = Traces(TelemetrySettings(), "test", bed.spans)
    bed.serving = bed.build(traces)
    yield bed
    traces.close()


def only_span(bed: Bed) -> ReadableSpan:
    bed.serving.traces.close()
    (span,) = bed.spans.get_finished_spans()
    return span


@pytest.mark.parametrize(("way", "model"), WAYS)
async def test_a_span_covers_the_request(traced: Bed, way: str, model: str) -> None:
    await traced.send(way, ask(model, traceparent=TRACE))
    span = only_span(traced)
    assert traced.serving.is_traced
    assert span.name == "serve"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == TRACE.split("-")[2]
    asked = {"model": model, "request_id": "r-1", "protocol": "grpc"}
    assert span.attributes == {**asked, "version": "3", "batch_rows": 2}
    assert span.status.is_unset
    assert span.context is not None
    sent = traced.dispatcher.ran[0][1].traceparent
    assert sent.split("-")[1:3] == [TRACE.split("-")[1], f"{span.context.span_id:016x}"]


@pytest.mark.parametrize(("way", "model"), WAYS)
@pytest.mark.parametrize("error", [EngineFailed("it broke"), ZeroDivisionError("a bug")])
async def test_a_span_ends_with_its_error(traced: Bed, error: Exception, way: str, model: str) -> None:
    traced.dispatcher.error = error
    with pytest.raises(PenstockError):
        await traced.send(way, ask(model))
    span = only_span(traced)
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == str(error)


@pytest.mark.parametrize(("way", "model"), WAYS)
async def test_a_span_ends_when_its_caller_leaves(traced: Bed, way: str, model: str) -> None:
    traced.dispatcher.gate.clear()
    running = asyncio.create_task(traced.send(way, ask(model)))
    await traced.dispatcher.is_called.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert only_span(traced).status.status_code is StatusCode.ERROR


async def test_a_request_that_is_refused_has_a_span(traced: Bed) -> None:
    with pytest.raises(UnknownModel):
        await traced.serving.serve(ask("nobody"))
    assert only_span(traced).status.status_code is StatusCode.ERROR


# --- callers' limits


def limited(name: str = "batch", **limits: float) -> Principal:
    return Principal(name, f"id-{name}", limits=KeyLimits(**limits))  # type: ignore[arg-type]


@pytest.mark.parametrize(("way", "model"), WAYS)
async def test_a_caller_over_its_rate_is_refused_and_nothing_runs(bed: Bed, way: str, model: str) -> None:
    key = limited(requests_per_s=2)
    for _ in range(2):
        await bed.send(way, ask(model, principal=key))
    ran = len(bed.dispatcher.ran)
    with pytest.raises(RateLimited) as refused:
        await bed.send(way, ask(model, principal=key))
    assert (refused.value.fields["limit"], refused.value.retry_after_s) == ("requests", 0.5)
    assert len(bed.dispatcher.ran) == ran
    assert bed.admission.inflight_requests == 0
    assert bed.count(model, "rate_limited") == bed.refusals("rate_limited") == 1
    await bed.send(way, ask(model, principal=limited("other", requests_per_s=2)))
    bed.now += 0.5
    await bed.send(way, ask(model, principal=key))


async def test_rows_are_those_of_the_batch(bed: Bed) -> None:
    key = limited(rows_per_s=6)
    await bed.serving.serve(ask("unbatched", rows=4, principal=key))
    await bed.serving.serve(ask(rows=4, principal=key))
    with pytest.raises(RateLimited, match="6 rows per second"):
        await bed.serving.serve(ask(rows=2, principal=key))
    request = ask(rows=1, principal=key)
    await bed.serving.serve(request)
    assert [(each.name, each.remaining) for each in request.limit_statuses] == [("rows", 0)]


@pytest.mark.parametrize(
    ("way", "model", "counted"), [("serve", "plain", 1), ("stream", "plain", 1), ("stream", "talker", 3)]
)
async def test_tokens_are_charged_when_they_are_known(bed: Bed, way: str, model: str, counted: int) -> None:
    key = limited(tokens_per_s=10)
    bed.dispatcher.parameters = {"tokens": 40}
    await bed.send(way, ask(model, principal=key))
    with pytest.raises(RateLimited) as refused:
        await bed.send(way, ask(model, principal=key))
    assert refused.value.fields["limit"] == "tokens"
    assert refused.value.retry_after_s == pytest.approx(4 * counted - 0.9)


@pytest.mark.parametrize("way", ["serve", "stream"])
async def test_concurrent_requests_are_limited_and_a_leaving_caller_makes_room(bed: Bed, way: str) -> None:
    key = limited(concurrency=1)
    bed.dispatcher.gate.clear()
    first = asyncio.create_task(bed.send(way, ask(principal=key)))
    await bed.dispatcher.is_called.wait()
    with pytest.raises(RateLimited) as refused:
        await bed.send(way, ask(principal=key))
    assert refused.value.fields["limit"] == "concurrency"
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    bed.dispatcher.gate.set()
    await bed.send(way, ask(principal=key))
    bed.dispatcher.error = EngineFailed("no")
    with pytest.raises(EngineFailed):
        await bed.send(way, ask(principal=key))
    bed.dispatcher.error = None
    await bed.send(way, ask(principal=key))


async def test_refused_requests_charge_nothing(bed: Bed) -> None:
    key = limited(requests_per_s=1)
    for request in (ask(rows=MAX_ROWS + 1, principal=key), ask("nobody", principal=key)):
        with pytest.raises((RequestTooLarge, UnknownModel)):
            await bed.serving.serve(request)
    await bed.serving.serve(ask(principal=key))
