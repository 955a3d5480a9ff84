"""THE order of a request; every protocol edge calls `serve` or `stream` and nothing beside them runs a model."""

import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from types import TracebackType
from typing import Self

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.errors import BUG, Cancelled, InternalError, InvalidRequest, ModelNotReady, PenstockError, Refused
from penstock.core.requests import InferRequest, InferResponse
from penstock.router.dispatcher import Dispatcher
from penstock.serving.admission import Admission
from penstock.serving.cache.responses import ResponseCache
from penstock.serving.callers import CallerCounts
from penstock.serving.meter import Meter, Metered
from penstock.serving.pace import StreamPace
from penstock.serving.plans import Plan, Plans
from penstock.serving.resolve import Resolver
from penstock.serving.sessions.ordered import OrderedSessions
from penstock.serving.shadows import Shadows
from penstock.telemetry.metrics import ServingMetrics
from penstock.telemetry.traces import OpenSpan, Traces

log = structlog.get_logger()
now = time.monotonic


class Serving:
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
        self.plans = Plans(metrics, dispatcher.routing)
        self.callers = CallerCounts(metrics.key_requests, metrics.key_tokens, self.plans.tallies)
        self.shadows = Shadows(resolver, self.plans, dispatcher, admission, metrics)
        self.plans.on_answered = self.shadows.offer

    async def serve(self, request: InferRequest, block: BlockDescription | None = None) -> InferResponse:
        """`block` is the request's, where the edge had to resolve it already; so for `stream`."""
        with _Admitted(self, request, block) as admitted:
            if request.principal.limits is not None or self.meter.has_defaults:
                admitted.metered = await self.meter.take(request, admitted.plan.block)
            while True:
                plan = admitted.plan
                try:
                    response = admitted.response = await self._route(plan, request, admitted.deadline)
                except ModelNotReady as error:
                    admitted.move(error)
                    continue
                response.version = plan.version
                return response

    async def stream(
        self, request: InferRequest, block: BlockDescription | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        """The answers to one request: one, or what a model gives that may give several, made as they are taken."""
        with _Admitted(self, request, block) as admitted:
            if request.principal.limits is not None or self.meter.has_defaults:
                admitted.metered = await self.meter.take(request, admitted.plan.block)
            while True:
                plan = admitted.plan
                block = plan.block
                try:
                    if not plan.may_stream:
                        response = admitted.response = await self._route(plan, request, admitted.deadline)
                        response.version = plan.version
                        break
                    session = request.controls.session
                    if session is not None and session.is_ordered:
                        made = self.sessions.stream(block, request, admitted.deadline, self.dispatcher.stream)
                    else:
                        made = self.dispatcher.stream(block, request, admitted.deadline)
                    pace = StreamPace(plan.paces, admitted.start) if plan.paces is not None else None
                    async with aclosing(made) as answers:
                        async for response in answers:
                            if pace is not None:
                                pace.answered(response, now())
                                if request.principal.key_id and not response.is_final:
                                    self.callers.spent(request.principal, response)
                            if not response.is_final and admitted.metered is not None:
                                admitted.metered.answered(response)
                            admitted.response = response
                            response.version = plan.version
                            yield response
                    return
                except ModelNotReady as error:
                    admitted.move(error)
        yield response

    def _route(self, plan: Plan, request: InferRequest, deadline: float) -> Awaitable[InferResponse]:
        """What has an order is answered in its session; else the cache may know it, or someone is asking the same."""
        block = plan.block
        if plan.is_decoupled:
            raise InvalidRequest(
                f"model '{block.model}' may give many answers to one request: ask it through ModelStreamInfer or a "
                "WebSocket"
            )
        session = request.controls.session
        if session is not None and session.is_ordered:
            return self.sessions.run(block, request, deadline, self.dispatcher.run)
        if plan.is_cached:
            return self.cache.through(block, request, deadline, self.dispatcher.run)
        return self.dispatcher.run(block, request, deadline)

    def turned_away(self, protocol: str, error: PenstockError) -> None:
        """An edge could not make a request of what it got: counted like the requests that were refused inside."""
        _count_failure(self.metrics, None, protocol, error)


class _Admitted:
    """One request inside: traced, released at its end, counted and logged by how it ended."""

    __slots__ = (
        "_block",
        "_request",
        "_routed",
        "_serving",
        "_span",
        "deadline",
        "metered",
        "plan",
        "response",
        "start",
    )
    start: float  # when it came
    plan: Plan
    deadline: float
    response: InferResponse  # the last one
    metered: Metered | None
    _routed: float  # when admission and resolution were done

    def __init__(self, serving: Serving, request: InferRequest, block: BlockDescription | None) -> None:
        self.start = now()
        self._serving = serving
        self._request = request
        self._block = block
        self._span: OpenSpan | None = None
        self.metered = None

    def __enter__(self) -> Self:
        serving, request = self._serving, self._request
        block: BlockDescription | None = None
        try:
            if serving.is_traced:
                self._span = _open_span(serving.traces, request)
            serving.admission.admit(request)
            try:
                block = self._block or serving.resolver.choose(request)
                if block.max_batch_size:
                    serving.admission.check_rows(request)
                plan = self.plan = serving.plans.of(block)
                self.deadline = self.start + plan.read(request)
            except BaseException:
                serving.admission.release(request)
                raise
        except BaseException as error:
            self._fail(error, block)
            raise
        self._routed = now()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._serving.admission.release(self._request)
        if self.metered is not None:
            self.metered.end()
            if error is None:
                self.metered.answered(self.response)
        if error is not None:
            self._fail(error, self.plan.block, self.plan)
            return
        response = self.response
        self.plan.answered(self._request, self.start, self._routed, now(), response)
        if self._request.principal.key_id:
            self._serving.callers.answered(self._request.principal)
            if self.plan.paces is not None:
                self._serving.callers.spent(self._request.principal, response)
        if self._span is not None:
            self._span.set(version=response.version, batch_rows=response.timing.batch_rows)
            self._span.end()

    def move(self, error: ModelNotReady) -> None:
        """Plans the request for the version that answers now, or raises the error."""
        serving, request = self._serving, self._request
        block = serving.resolver.choose_anew(request, self.plan.block, error)
        if self.plan.watch is not None:
            self.plan.watch.left(request)
        self.plan = serving.plans.of(block)
        self.plan.read(request)

    def _fail(self, error: BaseException, block: BlockDescription | None, plan: Plan | None = None) -> None:
        """Raises InternalError in place of what nobody expected."""
        if self._span is not None:
            self._span.end(error)
        request = self._request
        if isinstance(error, PenstockError):
            told = error
        else:
            told = InternalError(BUG) if isinstance(error, Exception) else Cancelled("the caller left")
        _count_failure(self._serving.metrics, block, request.protocol, told)
        if plan is not None and plan.watch is not None:
            plan.watch.failed(request, told)
        told_of = log.bind(request_id=request.request_id, model=request.model)
        if request.principal.key_id:
            self._serving.callers.failed(request.principal, told.code)
            told_of = told_of.bind(key=request.principal.name)
        if isinstance(told, InternalError) and told is not error:
            told_of.error("bug", where=request.protocol, exc_info=error)
            raise told from error
        if not isinstance(told, Refused):
            told_of.info("request_failed", code=told.code, error=str(told))


def _open_span(traces: Traces, request: InferRequest) -> OpenSpan:
    """Starts the request's span, which the request carries to the worker."""
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
    # An unknown name is the caller's text: as a label it would grow the metrics without end.
    model, version = (block.model, block.version) if block else ("", "")
    metrics.requests.labels(model, version, protocol, error.code).inc()
    if isinstance(error, Refused):
        metrics.refusals.labels(error.code).inc()
