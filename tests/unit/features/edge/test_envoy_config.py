"""Envoy's configuration: which headers, routes and sockets it has, and that Envoy accepts it."""

import hashlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.core.config import Limits
from penstock.features import edge
from penstock.features.edge.envoy_config import envoy_document
from penstock.features.edge.envoy_process import envoy_binary
from penstock.features.edge.envoy_shape import CertificateFiles, EdgePort, EdgeShape, TlsResources
from penstock.features.edge.gateway_sockets import GatewaySockets

TLS = TlsResources("/run/certificate.json", "/run/authorities.json", "optional")


def shape(is_native: bool = True, tls: TlsResources | CertificateFiles | None = None, **further: Any) -> EdgeShape:
    ports = [EdgePort("http", "127.0.0.1", 8080, 75.0), EdgePort("grpc", "::", 50051, 900.0)]
    backends = [GatewaySockets.of(Path("/run"), f"gateway-{index}", is_native) for index in range(2)]
    return EdgeShape(ports, backends, Limits(), "/run/admin", tls, **further)


def manager_of(document: Any) -> Any:
    listener = document["static_resources"]["listeners"][0]
    chain = listener.get("default_filter_chain") or listener["filter_chains"][0]
    return chain["filters"][-1]["typed_config"]


def secured(folder: Path, client_auth: Any, is_native: bool = True, **further: Any) -> EdgeShape:
    """Return a shape whose files for TLS are in the folder."""
    (folder / "certificate.json").write_text("{}")
    (folder / "authorities.json").write_text("{}")
    tls = TlsResources(str(folder / "certificate.json"), str(folder / "authorities.json"), client_auth)
    return shape(is_native, tls, **further)


def check(found: EdgeShape, folder: Path) -> None:
    """Let Envoy check the configuration."""
    config = folder / "envoy.json"
    config.write_text(json.dumps(envoy_document(found)))
    command = [str(envoy_binary()), "--mode", "validate", "-c", str(config), "--disable-hot-restart"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("lines", ["none", "refused", "all"])
def test_envoy_accepts_the_configuration(tmp_path: Path, is_native: bool, lines: Any) -> None:
    check(secured(tmp_path, "optional", is_native, access_lines=lines), tmp_path)


def test_envoy_accepts_http3(tmp_path: Path) -> None:
    found = secured(tmp_path, "none")
    with_http3 = replace(found, ports=[replace(found.ports[0], has_http3=True)])
    check(with_http3, tmp_path)
    over_tcp, over_udp = envoy_document(with_http3)["static_resources"]["listeners"]
    assert over_udp["address"]["socket_address"] == over_tcp["address"]["socket_address"] | {"protocol": "UDP"}


@pytest.mark.parametrize("name", ["connections", "small_messages"])
def test_a_filter_is_compiled_from_its_source(name: str) -> None:
    folder = Path(edge.__file__).parent
    source = (folder / f"{name}.c").read_bytes()
    compiled = (folder / f"{name}.wasm").read_bytes()
    assert compiled.endswith(b"source" + hashlib.sha256(source).digest()), "run scripts/wasm"


def test_headers_of_the_edge_are_removed_before_they_are_set() -> None:
    (mutation,) = manager_of(envoy_document(shape(tls=TLS)))["early_header_mutation_extensions"]
    removed, *added = mutation["typed_config"]["mutations"]
    assert removed == {"remove_on_match": {"key_matcher": {"prefix": "x-penstock-", "ignore_case": True}}}
    names = [each["append"]["header"]["key"] for each in added]
    assert names == ["x-penstock-client", "x-penstock-certificate"]


def test_no_certificate_is_named_if_clients_present_none() -> None:
    text = json.dumps(envoy_document(shape(tls=CertificateFiles("server.pem", "server-key.pem"))))
    assert "x-penstock-certificate" not in text
    assert '"filename": "server-key.pem"' in text


def test_every_gateway_is_a_backend_of_each_protocol() -> None:
    clusters = {each["name"]: each for each in envoy_document(shape())["static_resources"]["clusters"]}
    assert clusters.keys() == {"grpc", "native", "large", "http"}
    for cluster_name, cluster in clusters.items():
        name = "grpc" if cluster_name == "large" else cluster_name
        endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        paths = [each["endpoint"]["address"]["pipe"]["path"] for each in endpoints]
        assert paths == [f"/run/gateway-0-{name}", f"/run/gateway-1-{name}"]


def test_only_marked_calls_reach_the_native_server() -> None:
    manager = manager_of(envoy_document(shape()))
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert [route["route"]["cluster"] for route in routes] == ["native", "large", "grpc", "grpc", "http"]
    assert routes[0]["match"]["headers"][0]["name"] == "x-penstock-server"
    assert [each.get("disabled", False) for each in manager["http_filters"]] == [True, False]
    assert ["typed_per_filter_config" in route for route in routes] == [False, False, True, False, False]


def test_a_client_has_a_small_buffer_and_its_bodies_can_be_sent_again() -> None:
    document = envoy_document(shape())
    listeners = document["static_resources"]["listeners"]
    assert {each["per_connection_buffer_limit_bytes"] for each in listeners} == {64 * 1024}
    assert manager_of(document)["route_config"]["virtual_hosts"][0]["request_body_buffer_limit"] == 1024 * 1024


def test_without_the_native_server_nothing_is_held() -> None:
    manager = manager_of(envoy_document(shape(is_native=False)))
    assert [each["name"] for each in manager["http_filters"]] == ["envoy.filters.http.router"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert [route["route"]["cluster"] for route in routes] == ["grpc", "http"]


def test_gateways_are_checked_if_requests_can_go_to_another_one() -> None:
    several = shape()
    alone = replace(several, backends=several.backends[:1])
    for given, are_checked in ((several, True), (alone, False)):
        clusters = envoy_document(given)["static_resources"]["clusters"]
        assert ["health_checks" in each for each in clusters] == [are_checked] * 4
