"""OpenTelemetry spans of gateways and workers; nothing is imported or recorded unless an endpoint is set."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.config import TelemetrySettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

Attribute = str | int | float | bool


@dataclass(slots=True)
class OpenSpan:
    span: "Span"
    traceparent: str  # to send to the next process

    def set(self, **attributes: Attribute) -> None:
        self.span.set_attributes(attributes)

    def end(self, error: BaseException | None = None) -> None:
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self.span.set_status(Status(StatusCode.ERROR, str(error)))
        self.span.end()


class Traces:
    """Creates spans. `is_on` is False unless tracing is configured; callers check `is_on` first."""

    def __init__(self, settings: TelemetrySettings, service: str, exporter: "SpanExporter | None" = None) -> None:
        self.is_on = bool(settings.otlp_endpoint) or exporter is not None
        self._provider: Any = None
        if not self.is_on:
            return
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint.rstrip("/") + "/v1/traces")
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            sampler=ParentBased(TraceIdRatioBased(settings.trace_ratio)),
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penstock")

    def start(self, name: str, traceparent: str = "", start_ns: int | None = None, **attributes: Attribute) -> OpenSpan:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        context = propagator.extract({"traceparent": traceparent} if traceparent else {})
        span = self._tracer.start_span(name, context=context, start_time=start_ns, attributes=attributes)
        carrier: dict[str, Any] = {}
        propagator.inject(carrier, set_span_in_context(span))
        return OpenSpan(span, carrier.get("traceparent", ""))

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()
