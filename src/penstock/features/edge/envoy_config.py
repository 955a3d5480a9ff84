"""Makes Envoy's configuration, a JSON document. Pure: no I/O; the caller writes the document to a file."""

from collections.abc import Iterable, Sequence

from penstock.features.edge.envoy_http import SMALL_BYTES
from penstock.features.edge.envoy_ports import listeners
from penstock.features.edge.envoy_shape import BUFFER_BYTES, TYPE, Document, EdgeShape, seconds

HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
HEAP_BYTES = 400 * 1024 * 1024  # Envoy's memory; before it is full, the streams that hold most are reset
CONNECT_S = 1.0
LIVE = "/v2/health/live"
HANG_S = 2.0  # a gateway that answers two checks later than this gets no more requests until it answers a check


def envoy_document(shape: EdgeShape) -> Document:
    """Return the configuration of an Envoy in front of the backends."""
    return {
        "node": {"id": "edge", "cluster": "penstock"},
        "admin": {"address": {"pipe": {"path": shape.admin, "mode": 0o600}}},
        "application_log_config": {"log_format": {"json_format": _LOG_LINE}},
        "overload_manager": _overload_manager(shape),
        "static_resources": {
            "listeners": list(listeners(shape)),
            "clusters": list(_make_clusters(shape)),
        },
    }


_LOG_LINE = {"timestamp": "%Y-%m-%dT%T.%fZ", "level": "%l", "event": "envoy", "role": "edge", "message": "%j"}


def _overload_manager(shape: EdgeShape) -> Document:
    return {
        "refresh_interval": "0.1s",
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": 20},
        "resource_monitors": [
            {
                "name": "envoy.resource_monitors.fixed_heap",
                "typed_config": {
                    "@type": f"{TYPE}.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig",
                    "max_heap_size_bytes": str(HEAP_BYTES),
                },
            },
            {
                "name": "envoy.resource_monitors.global_downstream_max_connections",
                "typed_config": {
                    "@type": f"{TYPE}.extensions.resource_monitors.downstream_connections.v3"
                    ".DownstreamConnectionsConfig",
                    "max_active_downstream_connections": str(shape.most_connections),
                },
            },
        ],
        "actions": [
            _overload_action("shrink_heap", {"threshold": {"value": 0.8}}),
            _overload_action(
                "reset_high_memory_stream", {"scaled": {"scaling_threshold": 0.7, "saturation_threshold": 0.9}}
            ),
            _overload_action("stop_accepting_requests", {"threshold": {"value": 0.95}}),
        ],
    }


def _overload_action(name: str, trigger: Document) -> Document:
    return {
        "name": f"envoy.overload_actions.{name}",
        "triggers": [{"name": "envoy.resource_monitors.fixed_heap", **trigger}],
    }


# --- gateways


def _make_clusters(shape: EdgeShape) -> Iterable[Document]:
    yield _make_cluster("grpc", [each.grpc for each in shape.backends], _TAKE_ANSWERS)
    if shape.backends[0].native:
        yield _make_cluster("native", [each.native for each in shape.backends], _TAKE_ANSWERS)
        yield _make_cluster("large", [each.grpc for each in shape.backends], _HOLD_LITTLE)
    if shape.backends[0].http:
        yield _make_cluster("http", [each.http for each in shape.backends], None)


# A large window lets Envoy take whole answers, so that slow clients hold Envoy's memory, where the overload manager
# ends them, and none of the gateway's. But Envoy then also takes as much of a request before the gateway reads it.
_TAKE_ANSWERS = {"initial_stream_window_size": 64 * BUFFER_BYTES, "initial_connection_window_size": 256 * BUFFER_BYTES}
_HOLD_LITTLE = {"initial_stream_window_size": SMALL_BYTES, "initial_connection_window_size": 16 * BUFFER_BYTES}


def _make_cluster(name: str, paths: Sequence[str], http2: Document | None) -> Document:
    """Return a cluster of gateways. `http2`: the settings of HTTP/2; None: HTTP/1."""
    is_http2 = http2 is not None
    explicit = {"http2_protocol_options": http2} if is_http2 else {"http_protocol_options": {}}
    endpoints = [{"endpoint": {"address": {"pipe": {"path": path}}}} for path in paths]
    most = 1_000_000  # practically no limit, because the gateways refuse excess with a reason
    thresholds = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), most)
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": seconds(CONNECT_S),
        "lb_policy": "LEAST_REQUEST",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "circuit_breakers": {"thresholds": [thresholds]},
        "typed_extension_protocol_options": {
            HTTP_OPTIONS: {"@type": f"{TYPE}.{HTTP_OPTIONS.removeprefix('envoy.')}", "explicit_http_config": explicit}
        },
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        **(_health_checks(is_http2) if len(paths) > 1 else {}),
    }


def _health_checks(is_http2: bool) -> Document:
    """Return the health checks that move requests from a gateway that hangs or drains to another gateway."""
    check = {"grpc_health_check": {}} if is_http2 else {"http_health_check": {"path": LIVE, "host": "localhost"}}
    times = {"interval": "1s", "no_traffic_interval": "1s", "timeout": seconds(HANG_S)}
    return {
        "health_checks": [{**check, **times, "unhealthy_threshold": 2, "healthy_threshold": 1}],
        "close_connections_on_host_health_failure": True,
    }
