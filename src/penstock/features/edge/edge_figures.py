"""Envoy's figures as metrics of this server: connections, refusals, failures of TLS, and the state of gateways."""

import re
from collections.abc import Iterable, Mapping

import orjson
from prometheus_client import CollectorRegistry

from penstock.features.edge.envoy_process import EnvoyProcess
from penstock.telemetry.metrics import EdgeMetrics

# Envoy's names of counters, by the reason that `penstock_edge_refused` gives.
REFUSED = {
    "connections": r"listener\..*\.downstream_(global_cx_overflow|cx_overload_reject|cx_overflow)",
    "address": r"wasmcustom\.connections_of_address_refused",
    "memory": r"envoy\.overload_actions\.reset_high_memory_stream\.count"
    r"|http\.edge\.(downstream_rq_overload_close|rq_overload_local_reply)",
    "headers": r"http\.edge\.(downstream_rq_header_timeout|downstream_rq_too_large)|http2\.header_overflow",
    "timeouts": r"http\.edge\.(downstream_rq_idle_timeout|downstream_rq_timeout|downstream_rq_max_duration_reached)"
    r"|http2\.tx_flush_timeout",
    "tls": r"listener\..*\.(ssl\.connection_error|ssl\.fail_verify_\w+|downstream_cx_transport_socket_connect_timeout)",
    "protocol": r"http\.edge\.downstream_cx_protocol_error",
    "floods": r"http2\.(inbound_\w+_flood|outbound_\w*flood|requests_rejected_with_underscores_in_headers)",
}
COUNTED = {
    "connections": r"http\.edge\.downstream_cx_total",
    "requests": r"http\.edge\.downstream_rq_total",
    "gateway_failures": r"cluster\..*\.upstream_cx_connect_fail",
}
MEASURED = {
    "open_connections": r"http\.edge\.downstream_cx_active",
    "open_requests": r"http\.edge\.downstream_rq_active",
    "memory_bytes": r"server\.memory_allocated",
}
_WANTED = "|".join((*REFUSED.values(), *COUNTED.values(), *MEASURED.values()))
_PATH = f"/stats?format=json&filter={_WANTED}".replace("+", "%2B").replace("\\", "%5C").replace("|", "%7C")
Figures = Mapping[str, float]


def summed(figures: Figures, patterns: Mapping[str, str]) -> dict[str, float]:
    """Return the sum of the figures that match each pattern."""
    return {
        name: sum(value for each, value in figures.items() if re.fullmatch(pattern, each))
        for name, pattern in patterns.items()
    }


def grown(before: Figures, after: Figures) -> dict[str, float]:
    """Return how much each counter has grown. Counters start at zero again when Envoy restarts."""
    return {name: value - (before.get(name, 0) if value >= before.get(name, 0) else 0) for name, value in after.items()}


class EdgeFigures:
    """Copies Envoy's figures into metrics."""

    def __init__(self, envoy: EnvoyProcess, name: str) -> None:
        """Copy the figures of an Envoy. `name` distinguishes several edges of one process."""
        self._envoy = envoy
        self._name = name
        self._metrics = EdgeMetrics(CollectorRegistry())
        self._counted: Figures = {}
        self._refused: Figures = {}

    async def update(self) -> None:
        body = await self._envoy.ask("GET", _PATH)
        if not body:  # Envoy is starting or has ended
            return
        figures = _parse_stats(orjson.loads(body)["stats"])
        for name, value in summed(figures, MEASURED).items():
            getattr(self._metrics, name).labels(self._name).set(value)
        counted, refused = summed(figures, COUNTED), summed(figures, REFUSED)
        for name, value in grown(self._counted, counted).items():
            getattr(self._metrics, name).labels(self._name).inc(value)
        for reason, value in grown(self._refused, refused).items():
            self._metrics.refused.labels(self._name, reason).inc(value)
        self._counted, self._refused = counted, refused


def _parse_stats(stats: Iterable[Mapping[str, object]]) -> Figures:
    return {str(each["name"]): float(str(each["value"])) for each in stats if "name" in each}
