"""The path of every request. All endpoints call `serve` or `stream`; nothing else runs a model.

A streamed request is run like any other: the run returns the last answer and puts the answers before it into
`request.answers`.
"""

import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from types import TracebackType
from typing import Protocol, Self

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.errors import (
    BUG_MESSAGE,
    Cancelled,
    InternalError,
    InvalidRequest,
    ModelNotReady,
    PenstockError,
    Refused,
)
from penstock.core.requests import InferRequest, InferResponse
from penstock.features.cache.responses import ResponseCache
from penstock.features.limits.meter import Meter, Metered
from penstock.features.limits.usage import CallerCounts
from penstock.features.quotas.quota_check import QuotaCheck
from penstock.features.request_log.log_row import ANSWERED
from penstock.features.request_log.request_log import RequestLog
from penstock.features.rollouts.shadows import Shadows
from penstock.features.sessions.ordered_sessions import OrderedSessions
from penstock.router.answers import AnswerStream
from penstock.router.dispatcher import Dispatcher
from penstock.serving.admission import Admission
from penstock.serving.pace import StreamTimer
from penstock.serving.plans import MAX_TIMEOUT_S, Plan, Plans
from penstock.serving.resolve import WITHDRAWN, Resolver
from penstock.telemetry.metrics import ServingMetrics
from penstock.telemetry.traces import OpenSpan, Traces

log = structlog.get_logger()
now = time.monotonic


class QueryResolver(Protocol):
    """Selects the blocks of requests that send a search query."""

    async def resolve(self, request: InferRequest, deadline: float) -> str:
        """Return the id of a block that this gateway can call, or raise NoMatch."""


class Serving:
    """Runs requests: admits, resolves, meters, caches, routes, counts and logs each request."""

    def __init__(
        self,
        admission: Admission,
        resolver: Resolver,
        cache: ResponseCache,
        sessions: OrderedSessions,
        dispatcher: Dispatcher,
        metrics: ServingMetrics,
        traces: Traces,
        meter: Meter,
        quotas: QuotaCheck,
        search: QueryResolver,
        request_log: RequestLog | None = None,
    ) -> None:
        self.admission = admission
        self.resolver = resolver
        self.cache = cache
        self.sessions = sessions
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.traces = traces
        self.is_traced = traces.is_on
        self.meter = meter
        self.quotas = quotas
        self.search = search
        self.request_log = request_log  # None: requests are not logged
        self.plans = Plans(metrics, dispatcher.get_routing)
        self.callers = CallerCounts(metrics.key_requests, metrics.key_tokens, self.plans.tallies)
        self.shadows = Shadows(resolver, self.plans, dispatcher, admission, metrics)
        self.plans.on_answered = self.shadows.offer

    async def serve(self, request: InferRequest, block: BlockDescription | None = None) -> InferResponse:
        """Return the answer to the request. `block`: the block, if the endpoint has already resolved it."""
        with _AdmittedRequest(self, request, block) as admitted:
            return await self._run(admitted)

    async def stream(
        self, request: InferRequest, block: BlockDescription | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the answers to the request: one, or several as the model produces them and the caller takes them."""
        with _AdmittedRequest(self, request, block) as admitted:
            answers = AnswerStream()
            async with aclosing(answers.follow(self._run(admitted, answers))) as responses:
                async for response in responses:
                    admitted.count_streamed(response)
                    yield response

    async def _run(self, admitted: "_AdmittedRequest", answers: AnswerStream | None = None) -> InferResponse:
        """Run the request; return its last answer, and put the earlier answers into `answers`."""
        request = admitted.request
        if request.has_query:
            await admitted.resolve_query()
        if request.principal.limits is not None or self.meter.has_defaults:
            admitted.metered = await self.meter.take(request, admitted.plan.block)
        if self.quotas.is_on:
            await self.quotas.take(request, admitted.plan.block.block_id)
        while True:
            plan = admitted.plan
            if answers is not None:
                request.answers = answers if plan.may_stream else None
            try:
                response = admitted.response = await self._route(plan, request, admitted.deadline)
            except ModelNotReady as error:
                await admitted.use_successor(error)
                continue
            response.version = plan.version
            return response

    def _route(self, plan: Plan, request: InferRequest, deadline: float) -> Awaitable[InferResponse]:
        """Run the request in its ordered session, or through the cache (not if streamed), or directly."""
        block = plan.block
        if plan.is_decoupled and request.answers is None:
            raise InvalidRequest(
                f"model '{block.model}' may give many answers to one request: call it through ModelStreamInfer or a "
                "WebSocket"
            )
        session = request.controls.session
        if session is not None and session.is_ordered:
            return self.sessions.run(block, request, deadline, self.dispatcher.run)
        if plan.is_cached and request.answers is None:
            return self.cache.run(block, request, deadline, self.dispatcher.run)
        return self.dispatcher.run(block, request, deadline)

    def count_rejected(self, protocol: str, error: PenstockError, request: InferRequest | None = None) -> None:
        """Count a request that an endpoint rejected before it called `serve` or `stream`.

        If `request` is given, it has the caller and the parts of the message that were read, and is also logged.
        """
        _count_failure(self.metrics, None, protocol, error)
        if request is not None and self.request_log is not None:
            request.protocol = protocol
            self.request_log.add(request, None, error.code, 0.0, 0)


class _AdmittedRequest:
    """A request in flight: admitted and traced at its start; released, counted and logged at its end."""

    __slots__ = (
        "_block",
        "_is_planned",
        "_needs_search",
        "_routed_at",
        "_serving",
        "_span",
        "_stream_timer",
        "_streamed_bytes",
        "deadline",
        "metered",
        "plan",
        "request",
        "response",
        "start",
    )
    start: float  # when the request arrived
    plan: Plan  # not set while a search selects the block
    deadline: float
    response: InferResponse  # the last one
    metered: Metered | None
    _streamed_bytes: int  # size of the answers before the last one; counted only if requests are logged
    _routed_at: float  # when admission and resolution were done

    def __init__(self, serving: Serving, request: InferRequest, block: BlockDescription | None) -> None:
        self.start = now()
        self._serving = serving
        self.request = request
        self._block = block
        self._span: OpenSpan | None = None
        self._stream_timer: StreamTimer | None = None
        self.metered = None
        self._is_planned = False
        self._needs_search = block is None and request.has_query
        self._streamed_bytes = 0

    def __enter__(self) -> Self:
        serving, request = self._serving, self.request
        block: BlockDescription | None = None
        try:
            if serving.is_traced:
                self._span = _open_span(serving.traces, request)
            serving.admission.admit(request)
            try:
                if not self._needs_search:
                    block = self._block or serving.resolver.choose(request)
                    self._set_plan(block)
            except BaseException:
                serving.admission.release(request)
                raise
        except BaseException as error:
            self._report_failure(error, block)
            raise
        self._routed_at = now()
        return self

    def _set_plan(self, block: BlockDescription) -> None:
        serving, request = self._serving, self.request
        if request.binder is not None:
            if not block.is_described:
                serving.dispatcher.wake(block.block_id)  # the caller is asked to try again
            request.binder.bind(request, block)
        if block.max_batch_size:
            serving.admission.check_rows(request)
        plan = serving.plans.find_plan(block)
        self.deadline = self.start + plan.read_controls(request)
        self.plan, self._is_planned = plan, True

    async def resolve_query(self) -> None:
        """Search for the block that the request's query selects, and set the request's plan for that block."""
        timeout_s = MAX_TIMEOUT_S if self.request.timeout_s is None else min(self.request.timeout_s, MAX_TIMEOUT_S)
        self.request.model = await self._serving.search.resolve(self.request, self.start + timeout_s)
        self._set_plan(self._serving.resolver.choose(self.request))
        self._routed_at = now()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._serving.admission.release(self.request)
        if self.metered is not None:
            self.metered.end()
            if error is None:
                self.metered.charge_answer(self.response)
        if error is not None:
            plan = self.plan if self._is_planned else None
            self._report_failure(error, None if plan is None else plan.block, plan)
            return
        response = self.response
        self.plan.count_answer(self.request, self.start, self._routed_at, now(), response)
        if self._serving.request_log is not None:
            self._log_request(self.plan.block, ANSWERED, self._streamed_bytes + _count_bytes(response))
        if self.request.principal.key_id:
            self._serving.callers.count_answered(self.request.principal)
            if self.plan.token_times is not None:
                self._serving.callers.count_tokens(self.request.principal, response)
        if self._span is not None:
            self._span.set(version=response.version, batch_rows=response.timing.batch_rows)
            self._span.end()

    def count_streamed(self, response: InferResponse) -> None:
        """Count an answer of a stream, before the caller gets it."""
        plan, principal = self.plan, self.request.principal
        if plan.token_times is not None and self.request.answers is not None:
            self._stream_timer = self._stream_timer or StreamTimer(plan.token_times, self.start)
            self._stream_timer.observe_answer(response, now())
        if response.is_final:
            return  # counted when the request ends
        if self._serving.request_log is not None:
            self._streamed_bytes += _count_bytes(response)
        if plan.token_times is not None and principal.key_id:
            self._serving.callers.count_tokens(principal, response)
        if self.metered is not None:
            self.metered.charge_answer(response)
        response.version = plan.version

    async def use_successor(self, error: ModelNotReady) -> None:
        """Set the plan of the block that replaced the request's withdrawn block; raise the error if no block did."""
        serving, request = self._serving, self.request
        if self._needs_search and error.reason == WITHDRAWN:
            plan, request.model = self.plan, ""
            await self.resolve_query()
            if self.plan.block.block_id == plan.block.block_id:
                raise error
            if plan.watch is not None:
                plan.watch.end_request(request)
            return
        block = serving.resolver.choose_replacement(request, self.plan.block, error)
        if self.plan.watch is not None:
            self.plan.watch.end_request(request)
        self.plan = serving.plans.find_plan(block)
        self.plan.read_controls(request)

    def _report_failure(self, error: BaseException, block: BlockDescription | None, plan: Plan | None = None) -> None:
        """Count and log a failure; replace an unexpected exception by InternalError."""
        if self._span is not None:
            self._span.end(error)
        request = self.request
        if isinstance(error, PenstockError):
            reported = error
        else:
            reported = InternalError(BUG_MESSAGE) if isinstance(error, Exception) else Cancelled("the caller left")
        _count_failure(self._serving.metrics, block, request.protocol, reported)
        if plan is not None and plan.watch is not None:
            plan.watch.count_error(request, reported)
        self._log_request(block, reported.code, self._streamed_bytes)
        bound_log = log.bind(request_id=request.request_id, model=request.model)
        if request.principal.key_id:
            self._serving.callers.count_failed(request.principal, reported.code)
            bound_log = bound_log.bind(key=request.principal.name)
        if isinstance(reported, InternalError) and reported is not error:
            bound_log.error("bug", where=request.protocol, exc_info=error)
            raise reported from error
        if not isinstance(reported, Refused):
            bound_log.info("request_failed", code=reported.code, error=str(reported))

    def _log_request(self, block: BlockDescription | None, status: str, response_bytes: int) -> None:
        """Add the request to the request log, if the server has a request log."""
        if self._serving.request_log is not None:
            self._serving.request_log.add(self.request, block, status, now() - self.start, response_bytes)


def _count_bytes(response: InferResponse) -> int:
    return sum([len(tensor.data) for tensor in response.outputs])


def _open_span(traces: Traces, request: InferRequest) -> OpenSpan:
    """Start the request's span and set it as the parent of the worker's spans."""
    span = traces.start(
        "serve",
        request.traceparent,
        model=request.model,
        request_id=request.request_id,
        protocol=request.protocol,
    )
    if request.principal.key_id:
        span.set(key=request.principal.name)
    request.traceparent = span.traceparent
    return span


def _count_failure(
    metrics: ServingMetrics, block: BlockDescription | None, protocol: str, error: PenstockError
) -> None:
    # Without a block the name is the caller's text: as a label it would let callers create endless metrics.
    model, version = (block.model, block.version) if block else ("", "")
    metrics.requests.labels(model, version, protocol, error.code).inc()
    if isinstance(error, Refused):
        metrics.refusals.labels(error.code).inc()
