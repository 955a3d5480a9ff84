"""The listeners in Envoy's configuration: TLS, HTTP/3, limits of connections, and the answer to plain HTTP."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.core.config import Limits
from penstock.endpoints.http.handshake import PLAIN_HTTP_ERROR
from penstock.features.edge.envoy_http import STREAMS, http_manager, router
from penstock.features.edge.envoy_shape import (
    TYPE,
    CertificateFiles,
    Document,
    EdgePort,
    EdgeShape,
    TlsResources,
    named,
    seconds,
    wasm_plugin,
)

HTTP = "envoy.filters.network.http_connection_manager"
# Read buffer of a client's connection. Envoy parses one buffer before it serves the next connection, and header blocks
# of 64 KiB can take milliseconds.
CLIENT_BUFFER_BYTES = 64 * 1024
# On a port with TLS, for a client's first bytes to show whether they are plain HTTP. The connection counts for its
# address only then, so silent clients must not take long.
INSPECTION_S = 0.5
CIPHERS = [
    "[ECDHE-ECDSA-AES128-GCM-SHA256|ECDHE-ECDSA-CHACHA20-POLY1305]",
    "[ECDHE-RSA-AES128-GCM-SHA256|ECDHE-RSA-CHACHA20-POLY1305]",
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384",
]


def listeners(shape: EdgeShape) -> Iterator[Document]:
    for port in shape.ports:
        yield _make_listener(shape, port)
        if port.has_http3:
            yield _make_http3_listener(shape, port)


def _make_listener(shape: EdgeShape, port: EdgePort) -> Document:
    chain: Document = {"filters": [_connection_limit_filter(shape), named(HTTP, http_manager(shape, port))]}
    chains: Document = {"filter_chains": [chain]}
    if shape.tls is not None:
        chain["transport_socket"] = _downstream_tls(shape.tls)
        chain["transport_socket_connect_timeout"] = seconds(shape.limits.header_timeout_s)
        chains = {
            "listener_filters": [_inspector_filter("tls"), _inspector_filter("http")],
            "listener_filters_timeout": seconds(INSPECTION_S),
            "continue_on_listener_filters_timeout": True,
            "filter_chains": [_plain_http_chain(shape)],
            "default_filter_chain": chain,
        }
    return {
        "name": port.name,
        "address": {"socket_address": _listener_address(port)},
        "per_connection_buffer_limit_bytes": CLIENT_BUFFER_BYTES,
        "socket_options": [_unread_timeout_option(shape.limits)],
        **chains,
    }


def _make_http3_listener(shape: EdgeShape, port: EdgePort) -> Document:
    """Return the listener for HTTP/3, at the same port number over UDP."""
    assert shape.tls is not None
    quic = {
        "@type": f"{TYPE}.extensions.transport_sockets.quic.v3.QuicDownstreamTransport",
        "downstream_tls_context": _tls_context(shape.tls, ["h3"]),
    }
    options = {
        "quic_protocol_options": {"max_concurrent_streams": STREAMS},
        "idle_timeout": seconds(port.idle_s),
        "crypto_handshake_timeout": seconds(shape.limits.header_timeout_s),
    }
    return {
        "name": f"{port.name}-http3",
        "address": {"socket_address": {"protocol": "UDP", **_listener_address(port)}},
        "udp_listener_config": {
            "quic_options": options,
            "downstream_socket_config": {"prefer_gro": True},
        },
        "filter_chains": [
            {
                "filters": [
                    _connection_limit_filter(shape),
                    named(HTTP, http_manager(shape, port) | {"codec_type": "HTTP3"}),
                ],
                "transport_socket": named("envoy.transport_sockets.quic", quic),
            }
        ],
    }


def _connection_limit_filter(shape: EdgeShape) -> Document:
    """Return the filter that limits the connections of each client address; its source is connections.c."""
    most = max(1, int(shape.limits.client_share * shape.most_connections))
    return named(
        "envoy.filters.network.wasm",
        {"@type": f"{TYPE}.extensions.filters.network.wasm.v3.Wasm", "config": wasm_plugin("connections", most)},
    )


def _listener_address(port: EdgePort) -> Document:
    address = {"address": port.host, "port_value": port.port}
    return address | ({"ipv4_compat": True} if port.host == "::" else {})


def _inspector_filter(protocol: str) -> Document:
    config = f"{TYPE}.extensions.filters.listener.{protocol}_inspector.v3.{protocol.capitalize()}Inspector"
    return named(f"envoy.filters.listener.{protocol}_inspector", {"@type": config})


def _plain_http_chain(shape: EdgeShape) -> Document:
    """Return the answer to plain HTTP/1 on a port with TLS. Other plain connections fail in the TLS handshake."""
    limits = shape.limits
    refusal = {"status": 400, "body": {"inline_string": PLAIN_HTTP_ERROR.decode()}}
    manager = {
        "@type": f"{TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "edge_plain",
        "codec_type": "HTTP1",
        "max_request_headers_kb": max(1, limits.max_header_bytes // 1024),
        "request_headers_timeout": seconds(limits.header_timeout_s),
        "common_http_protocol_options": {"max_requests_per_connection": 1},
        "route_config": {
            "response_headers_to_add": [{"header": {"key": "content-type", "value": "application/json"}}],
            "virtual_hosts": [
                {
                    "name": "plain",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "direct_response": refusal}],
                }
            ],
        },
        "http_filters": [router()],
    }
    return {
        "filter_chain_match": {"transport_protocol": "raw_buffer", "application_protocols": ["http/1.0", "http/1.1"]},
        "filters": [_connection_limit_filter(shape), named(HTTP, manager)],
    }


def _unread_timeout_option(limits: Limits) -> Document:
    """Return the option that makes the kernel close a connection whose client reads nothing."""
    tcp, user_timeout = 6, 18
    return {"level": tcp, "name": user_timeout, "int_value": int(1000 * limits.answer_timeout_s)}


def _downstream_tls(tls: TlsResources | CertificateFiles) -> Document:
    context = f"{TYPE}.extensions.transport_sockets.tls.v3.DownstreamTlsContext"
    return named("envoy.transport_sockets.tls", {"@type": context, **_tls_context(tls, ["h2", "http/1.1"])})


def _tls_context(tls: TlsResources | CertificateFiles, protocols: Sequence[str]) -> Document:
    common: Document = {
        "alpn_protocols": list(protocols),
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2", "cipher_suites": CIPHERS},
    }
    if isinstance(tls, TlsResources):
        common["tls_certificate_sds_secret_configs"] = [_make_secret("certificate", tls.certificate_file)]
        authorities = {"validation_context_sds_secret_config": _make_secret("authorities", tls.ca_file)}
    else:
        pair = {"certificate_chain": {"filename": tls.certificate_file}, "private_key": {"filename": tls.key_file}}
        common["tls_certificates"] = [pair]
        authorities = {"validation_context": {"trusted_ca": {"filename": tls.ca_file}}}
    if tls.client_auth != "none":
        common |= authorities
    return {
        "require_client_certificate": tls.client_auth == "required",
        "common_tls_context": common,
    }


def _make_secret(name: str, path: str) -> Document:
    return {"name": name, "sds_config": {"path_config_source": {"path": path}, "resource_api_version": "V3"}}


def tls_resource(name: str, secret: Mapping[str, Any]) -> Document:
    """Return the content of a file with a certificate or authorities, which Envoy watches."""
    return {"resources": [{"@type": f"{TYPE}.extensions.transport_sockets.tls.v3.Secret", "name": name, **secret}]}
