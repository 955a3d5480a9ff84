"""Which sockets gateways and workers open behind an edge, and who may open them."""

from pathlib import Path

import pytest

from penstock.app.gateway.clients_edge import find_direct_sockets, find_gateway_sockets, find_manager_sockets, has_ports
from penstock.core.config import load_config
from penstock.core.errors import ConfigError
from penstock.features.edge.gateway_sockets import GatewaySockets


def test_a_folder_that_every_user_can_open_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 0750"):
        find_gateway_sockets(load_config(edge_sockets=tmp_path), "gateway-0")
    tmp_path.chmod(0o750)
    found = find_gateway_sockets(load_config(edge_sockets=tmp_path), "gateway-0")
    assert found is not None
    assert found.http == f"{tmp_path}/gateway-0-http"


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="create the folder"):
        find_gateway_sockets(load_config(edge_sockets=tmp_path / "missing"), "gateway-0")


def test_without_an_edge_gateways_open_ports() -> None:
    assert find_gateway_sockets(load_config(), "gateway-0") is None
    assert has_ports(load_config())
    assert not has_ports(load_config(edge_sockets="/run/penstock"))


def test_a_worker_has_an_edge_of_its_own_if_its_gateways_have_one(tmp_path: Path) -> None:
    behind = find_direct_sockets(load_config(edge_sockets=tmp_path), tmp_path, "worker-0")
    assert behind is not None
    assert (behind.grpc, behind.http) == (f"{tmp_path}/worker-0-direct-grpc", "")
    assert find_direct_sockets(load_config(), tmp_path, "worker-0") is None
    assert find_direct_sockets(load_config(edge_sockets="/run/penstock"), tmp_path, "worker-0") is None


def test_a_manager_has_an_edge_if_other_hosts_reach_it(tmp_path: Path) -> None:
    def sockets(bind: str) -> GatewaySockets | None:
        return find_manager_sockets(load_config(cluster={"bind": bind}, edge_sockets=tmp_path), tmp_path)

    assert sockets("0.0.0.0:7400") == GatewaySockets(f"{tmp_path}/manager-grpc", f"{tmp_path}/manager-http")
    assert sockets("127.0.0.1:7400") is None
