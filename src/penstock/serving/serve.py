"""THE order of a request; every protocol edge calls `serve` and nothing beside it runs a model."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.errors import Cancelled, PenstockError, Refused
from penstock.core.requests import InferRequest, InferResponse
from penstock.router.dispatcher import Dispatcher
from penstock.serving.admission import Admission
from penstock.serving.resolve import Resolver
from penstock.telemetry.metrics import ServingMetrics
from penstock.telemetry.tally import Tallies
from penstock.telemetry.traces import Traces

log = structlog.get_logger()
now = time.monotonic


class Serving:
    def __init__(
        self,
        admission: Admission,
        resolver: Resolver,
        dispatcher: Dispatcher,
        metrics: ServingMetrics,
        traces: Traces,
    ) -> None:
        self.admission = admission
        self.resolver = resolver
        self.dispatcher = dispatcher
        self._metrics = metrics
        self._traces = traces
        # Looked at once: the untraced way has no step more than it needs.
        self.serve: Callable[[InferRequest], Awaitable[InferResponse]]
        self.serve = self._serve_traced if traces.is_on else self._serve
        self.is_traced = traces.is_on
        self._by_block: dict[str, _BlockMetrics] = {}
        self.tallies = Tallies()

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
                metrics = self._metrics_of(block)
                routed = now()
                response = await self.dispatcher.run(block, request, start + _timeout_s(block, request))
            finally:
                self.admission.release(request)
        except PenstockError as error:
            self._log_failure(request, block, error)
            raise
        except asyncio.CancelledError:
            self._log_failure(request, block, Cancelled("the caller left"))
            raise
        response.version = block.version
        metrics.answered(request.protocol, start, routed, now(), response)
        return response

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

    def _metrics_of(self, block: BlockDescription) -> "_BlockMetrics":
        metrics = self._by_block.get(block.block_id)
        if metrics is None:
            metrics = self._by_block[block.block_id] = _BlockMetrics(self._metrics, block, self.tallies)
        return metrics

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


class _BlockMetrics:
    """The serving metrics with one block's labels bound once."""

    def __init__(self, metrics: ServingMetrics, block: BlockDescription, tallies: Tallies) -> None:
        labels = (block.model, block.version)
        self._requests = {
            protocol: tallies.counter(metrics.requests.labels(*labels, protocol, "ok"))
            for protocol in ("grpc", "grpc-stream", "rest")
        }
        self._request_seconds = tallies.histogram(metrics.request_seconds.labels(*labels))
        self._admit_seconds = tallies.histogram(metrics.admit_seconds.labels(*labels))
        self._reply_seconds = tallies.histogram(metrics.reply_seconds.labels(*labels))

    def answered(self, protocol: str, start: float, routed: float, end: float, response: InferResponse) -> None:
        timing = response.timing
        on_worker = (timing.queue_ns + timing.batch_ns + timing.compute_ns + timing.finish_ns) / 1e9
        self._requests[protocol].inc()
        self._request_seconds.observe(end - start)
        self._admit_seconds.observe(routed - start)
        self._reply_seconds.observe(max(0.0, end - routed - on_worker))


def _timeout_s(block: BlockDescription, request: InferRequest) -> float:
    """The caller's deadline, or the model's; a `timeout` parameter (microseconds, as Triton's) can only shorten it."""
    timeout_s = block.settings.timeouts.request_s if request.timeout_s is None else request.timeout_s
    asked = request.parameters.get("timeout")
    if isinstance(asked, int) and asked > 0:
        timeout_s = min(timeout_s, asked / 1e6)
    return timeout_s
