"""THE order of a request; every protocol edge calls `serve` or `stream` and nothing beside them runs a model."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.errors import Cancelled, InvalidRequest, PenstockError, Refused
from penstock.core.requests import InferRequest, InferResponse
from penstock.router.dispatcher import Dispatcher
from penstock.serving.admission import Admission
from penstock.serving.cache.responses import ResponseCache
from penstock.serving.controls import TIMEOUT
from penstock.serving.plans import Plan, Plans
from penstock.serving.resolve import Resolver
from penstock.serving.sessions.runs import SessionRuns
from penstock.telemetry.metrics import ServingMetrics
from penstock.telemetry.traces import Traces

log = structlog.get_logger()
now = time.monotonic


class Serving:
    def __init__(
        self,
        admission: Admission,
        resolver: Resolver,
        cache: ResponseCache,
        sessions: SessionRuns,
        dispatcher: Dispatcher,
        metrics: ServingMetrics,
        traces: Traces,
    ) -> None:
        self.admission = admission
        self.resolver = resolver
        self.cache = cache
        self.sessions = sessions
        self.dispatcher = dispatcher
        self._metrics = metrics
        self._traces = traces
        # Looked at once: the untraced way has no step more than it needs.
        self.serve: Callable[[InferRequest], Awaitable[InferResponse]]
        self.serve = self._serve_traced if traces.is_on else self._serve
        self.is_traced = traces.is_on
        self.plans = Plans(metrics, dispatcher.routing)

    def turned_away(self, protocol: str, error: PenstockError) -> None:
        """An edge could not make a request of what it got: counted like the requests that were refused inside."""
        self._metrics.requests.labels("", "", protocol, error.code).inc()
        if isinstance(error, Refused):
            self._metrics.refusals.labels(error.code).inc()

    async def _serve(self, request: InferRequest) -> InferResponse:
        start = now()
        block: BlockDescription | None = None
        try:
            self.admission.admit(request)
            try:
                block = self.resolver.resolve(request.model, request.version)
                if block.max_batch_size:
                    self.admission.check_rows(request)
                plan = self.plans.of(block)
                request.controls = plan.controls.read(request.parameters)
                deadline = start + _timeout_s(plan, request)
                routed = now()
                if plan.is_plain and request.controls.session is None:
                    response = await self.dispatcher.run(block, request, deadline)
                else:
                    found = self.cache.find_now(block, request) if plan.is_cached else None
                    response = found or await self._answer(plan, request, deadline)
            finally:
                self.admission.release(request)
        except PenstockError as error:
            self._log_failure(request, block, error)
            raise
        except asyncio.CancelledError:
            self._log_failure(request, block, Cancelled("the caller left"))
            raise
        response.version = block.version
        plan.answered(request.protocol, start, routed, now(), response)
        return response

    async def _answer(self, plan: Plan, request: InferRequest, deadline: float) -> InferResponse:
        """What is asked in a session is answered there; else the cache may know it, or someone is asking the same."""
        block = plan.block
        if plan.is_decoupled:
            raise InvalidRequest(
                f"model '{block.model}' may give many answers to one request: ask it through ModelStreamInfer or a "
                "WebSocket"
            )
        if request.controls.session is not None:
            return await self.sessions.run(
                block, request, deadline, lambda step, until: self.dispatcher.run(block, step, until)
            )
        if plan.is_cached:
            return await self.cache.through(
                block, request, deadline, lambda until: self.dispatcher.run(block, request, until)
            )
        return await self.dispatcher.run(block, request, deadline)

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The answers to one request: one, or what a decoupled model gives, made as they are taken."""
        if not self._is_decoupled(request):
            yield await self.serve(request)
            return
        start = now()
        block: BlockDescription | None = None
        try:
            self.admission.admit(request)
            try:
                block = self.resolver.resolve(request.model, request.version)
                plan = self.plans.of(block)
                request.controls = plan.controls.read(request.parameters)
                if request.controls.session is not None and not block.settings.sessions.is_stateful:
                    raise InvalidRequest(f"model '{block.model}' keeps no sessions: its answers have no order to keep")
                deadline = start + _timeout_s(plan, request)
                routed = now()
                async with aclosing(self.dispatcher.stream(block, request, deadline)) as answers:
                    async for response in answers:
                        response.version = block.version
                        yield response
            finally:
                self.admission.release(request)
        except PenstockError as error:
            self._log_failure(request, block, error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._log_failure(request, block, Cancelled("the caller left"))
            raise
        plan.answered(request.protocol, start, routed, now(), response)

    def _is_decoupled(self, request: InferRequest) -> bool:
        try:
            return self.resolver.resolve(request.model, request.version).settings.is_decoupled
        except PenstockError:
            return False  # `serve` says what is wrong, and counts it

    async def _serve_traced(self, request: InferRequest) -> InferResponse:
        span = self._traces.start(
            "serve",
            request.traceparent,
            model=request.model,
            request_id=request.request_id,
            protocol=request.protocol,
        )
        request.traceparent = span.traceparent
        try:
            response = await self._serve(request)
            span.set(version=response.version, batch_rows=response.timing.batch_rows)
        except BaseException as error:
            span.end(error)
            raise
        span.end()
        return response

    def _log_failure(self, request: InferRequest, block: BlockDescription | None, error: PenstockError) -> None:
        # An unknown name is the caller's text: as a label it would grow the metrics without end.
        model, version = (block.model, block.version) if block else ("", "")
        self._metrics.requests.labels(model, version, request.protocol, error.code).inc()
        if isinstance(error, Refused):
            self._metrics.refusals.labels(error.code).inc()
        else:
            log.info(
                "request_failed",
                request_id=request.request_id,
                model=request.model,
                code=error.code,
                error=str(error),
            )


def _timeout_s(plan: Plan, request: InferRequest) -> float:
    """The caller's deadline, or the model's; a `timeout` parameter (microseconds, as Triton's) can only shorten it.

    Where the block's queue policy lets requests override its timeout, the parameter is for the time in queues alone.
    """
    timeout_s = plan.request_s if request.timeout_s is None else request.timeout_s
    if request.parameters:
        asked = request.parameters.get(TIMEOUT)
        if isinstance(asked, int) and asked > 0 and not plan.controls.may_override_timeout(request.controls):
            timeout_s = min(timeout_s, asked / 1e6)
    return timeout_s
