"""The handling of HTTP in Envoy's configuration: limits, identities, routes and access lines."""

from collections.abc import Iterable

from penstock.features.edge.envoy_shape import (
    BUFFER_BYTES,
    TYPE,
    AccessLines,
    Document,
    EdgePort,
    EdgeShape,
    named,
    seconds,
    wasm_plugin,
)

INFER = "/inference.GRPCInferenceService/ModelInfer"
SMALL_BYTES = 256 * 1024  # larger messages go to grpcio, which reads them when there is room for them
WINDOW_BYTES = SMALL_BYTES  # bytes that a client may send on a stream before the gateway reads them
WAITING_CALLS = 64  # of one connection that may wait for room in the gateway without keeping others from arriving
IDLE_GRPC_S = 15 * 60.0  # a client whose connection was closed between calls opens another by itself
TRIES = 6  # to connect to a gateway, which may be restarting: with these pauses, about three seconds
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
SMALL_MESSAGES = "envoy.filters.http.wasm"  # off, except for the calls whose server it chooses
SERVER = "x-penstock-server"
OFFER_S = 24 * 60 * 60  # clients may remember for this time that a port serves HTTP/3
STREAMS = 1000  # concurrent calls of one connection; clients delay further calls


def http_manager(shape: EdgeShape, port: EdgePort) -> Document:
    """Return the settings for HTTP on a port."""
    limits = shape.limits
    return {
        "@type": f"{TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "edge",
        "codec_type": "AUTO",
        "server_header_transformation": "PASS_THROUGH",
        "use_remote_address": True,
        "skip_xff_append": True,
        "generate_request_id": False,
        "preserve_external_request_id": True,
        "forward_client_cert_details": "SANITIZE",
        "max_request_headers_kb": max(1, limits.max_header_bytes // 1024),
        "request_headers_timeout": seconds(limits.header_timeout_s),
        "stream_idle_timeout": "0s",  # a model may work for long before it answers; the gateway limits slow senders
        "drain_timeout": "0.5s",  # between the two announcements that a connection ends
        "stream_flush_timeout": seconds(limits.answer_timeout_s),
        "common_http_protocol_options": {
            "idle_timeout": seconds(port.idle_s),
            "max_headers_count": limits.max_headers,
        },
        "http_protocol_options": {"accept_http_10": True},
        "http2_protocol_options": {
            "max_concurrent_streams": STREAMS,
            "initial_stream_window_size": WINDOW_BYTES,
            "initial_connection_window_size": WAITING_CALLS * WINDOW_BYTES,
            "connection_keepalive": {"interval": seconds(port.ping_s), "timeout": seconds(port.ping_s)},
        },
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "early_header_mutation_extensions": [_identity_filter(shape)],
        "local_reply_config": _LOCAL_REPLY,
        "access_log": list(_access_log(shape.access_lines)),
        "route_config": {"virtual_hosts": [_virtual_host(shape)], **(_http3_header(port) if port.has_http3 else {})},
        "http_filters": list(_http_filters(shape)),
    }


def _http3_header(port: EdgePort) -> Document:
    """Return the header that announces HTTP/3 over UDP at this port number."""
    offer = {"key": "alt-svc", "value": f'h3=":{port.port}"; ma={OFFER_S}'}
    return {"response_headers_to_add": [{"header": offer, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]}


# Envoy's own answers, for example when no gateway answers, look like the gateway's.
_IS_GRPC = {"name": "content-type", "string_match": {"prefix": "application/grpc"}}
_LOCAL_REPLY = {
    "mappers": [
        {
            "filter": {"header_filter": {"header": {**_IS_GRPC, "invert_match": True}}},
            "body_format_override": {"json_format": {"error": "%LOCAL_REPLY_BODY%"}},
        }
    ]
}


def _identity_filter(shape: EdgeShape) -> Document:
    """Return the filter that replaces a client's identity headers with the identity of the client's connection."""
    given = {"x-penstock-client": "%DOWNSTREAM_REMOTE_ADDRESS%"}
    if shape.tls is not None and shape.tls.client_auth != "none":
        given["x-penstock-certificate"] = "%DOWNSTREAM_PEER_CERT%"
    added = [
        {"append": {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}}
        for key, value in given.items()
    ]
    return named(
        "envoy.http.early_header_mutation.header_mutation",
        {
            "@type": f"{TYPE}.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            "mutations": [{"remove_on_match": {"key_matcher": {"prefix": "x-penstock-", "ignore_case": True}}}, *added],
        },
    )


def _access_log(lines: AccessLines) -> Iterable[Document]:
    if lines == "none":
        return
    log: Document = named(
        "envoy.access_loggers.stderr",
        {
            "@type": f"{TYPE}.extensions.access_loggers.stream.v3.StderrAccessLog",
            "log_format": {"json_format": _ACCESS_LINE},
        },
    )
    if lines == "refused":  # log only refusals by Envoy, because the gateway logs its own
        log["filter"] = {"response_flag_filter": {}}
    yield log


_ACCESS_LINE = {
    "timestamp": "%START_TIME%",
    "level": "info",
    "event": "edge_request",
    "role": "edge",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS%",
    "connection": "%CONNECTION_ID%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ):200%",
    "protocol": "%PROTOCOL%",
    "status": "%RESPONSE_CODE%",
    "grpc_status": "%GRPC_STATUS%",
    "reason": "%RESPONSE_FLAGS% %RESPONSE_CODE_DETAILS%",
    "received_bytes": "%BYTES_RECEIVED%",
    "sent_bytes": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
}


# --- routes


def _virtual_host(shape: EdgeShape) -> Document:
    routes: list[Document] = []
    if shape.backends[0].native:
        to_native = {"path": INFER, "headers": [{"name": SERVER, "string_match": {"exact": "native"}}]}
        routes.append({"match": to_native, "route": _make_route("native")})
        to_grpcio = {"path": INFER, "headers": [{"name": SERVER, "string_match": {"exact": "large"}}]}
        routes.append({"match": to_grpcio, "route": _make_route("large")})
        routes.append(_undecided_route(shape))
    routes.append({"match": {"prefix": "/", "grpc": {}}, "route": _make_route("grpc")})
    if shape.backends[0].http:
        routes.append({"match": {"prefix": "/"}, "route": _make_route("http")})
    return {"name": "penstock", "domains": ["*"], "request_body_buffer_limit": BUFFER_BYTES, "routes": routes}


def _undecided_route(shape: EdgeShape) -> Document:
    """Return the route of a ModelInfer whose server the filter for small messages chooses."""
    undecided = {"path": INFER, "grpc": {}, "headers": [{"name": SERVER, "present_match": False}]}
    route = {**_make_route("grpc"), "idle_timeout": seconds(shape.limits.body_timeout_s)}
    enabled = {SMALL_MESSAGES: {"@type": f"{TYPE}.config.route.v3.FilterConfig", "config": {}}}
    return {"match": undecided, "route": route, "typed_per_filter_config": enabled}


def _make_route(cluster: str) -> Document:
    return {
        "cluster": cluster,
        "timeout": "0s",
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream",  # the gateway has not received the request
            "num_retries": TRIES,
            "retry_back_off": {
                "base_interval": seconds(FIRST_PAUSE_S),
                "max_interval": seconds(LONGEST_PAUSE_S),
            },
        },
    }


def _http_filters(shape: EdgeShape) -> Iterable[Document]:
    if shape.backends[0].native:
        config = f"{TYPE}.extensions.filters.http.wasm.v3.Wasm"
        plugin = wasm_plugin("small_messages", SMALL_BYTES) | {"allow_on_headers_stop_iteration": True}
        yield named(SMALL_MESSAGES, {"@type": config, "config": plugin}) | {"disabled": True}
    yield router()


def router() -> Document:
    router = {
        "@type": f"{TYPE}.extensions.filters.http.router.v3.Router",
        "suppress_envoy_headers": True,
        "dynamic_stats": False,
    }
    return named("envoy.filters.http.router", router)
