"""Addresses and names of roles, and refused settings."""

import json
from pathlib import Path

import pytest

from penstock.core.cluster.addresses import Address
from penstock.core.config import Config, load_config
from penstock.core.errors import ConfigError
from penstock.storage.process_addresses import (
    ServerPaths,
    check_bind,
    check_join,
    check_store,
    find_advertised_manager,
    find_clients_address,
    find_gateway_endpoint,
    find_manager_address,
    is_clustered,
    make_role_id,
    parse_join_addresses,
)
from penstock.wire.zmq_endpoints import Endpoint


def config(host: str = "127.0.0.1", **cluster: str) -> Config:
    return load_config(host=host, cluster=cluster)


def test_a_single_machine_has_sockets_in_its_folder_and_short_ids(tmp_path: Path) -> None:
    alone = Config()
    paths = ServerPaths(tmp_path)
    assert not is_clustered(alone)
    assert make_role_id(alone, "worker-0") == "worker-0"
    assert paths.list_managers(alone) == (f"unix:{tmp_path}/manager.sock",)
    assert paths.get_gateway_endpoint("gateway-0", alone) == Endpoint(f"ipc://{tmp_path}/gateway-0.ipc")


def test_role_ids_in_a_cluster_contain_the_nodes_name() -> None:
    assert make_role_id(config(join="h", node="n1"), "worker-0") == "n1.worker-0"
    assert make_role_id(config(bind="10.0.0.1", node="n1"), "gateway-1") == "n1.gateway-1"
    assert config().cluster.node_name  # the machine's own


@pytest.mark.parametrize(
    ("join", "managers"),
    [
        ("10.0.0.1", ("10.0.0.1:7400",)),
        ("box:1", ("box:1",)),
        ("10.0.0.1, 10.0.0.2:5", ("10.0.0.1:7400", "10.0.0.2:5")),
        ("etcd://a:2379,b:2379/x", ("etcd://a:2379,b:2379/x",)),
    ],
)
def test_addresses_of_joined_managers(tmp_path: Path, join: str, managers: tuple[str, ...]) -> None:
    assert ServerPaths(tmp_path).list_managers(config(join=join)) == managers


def test_managers_join_only_a_store() -> None:
    check_store(config())
    check_store(config(join="etcd://a:2379"))
    with pytest.raises(ConfigError, match="need a shared etcd"):
        check_store(config(join="10.0.0.1:7400"))


def test_hosts_in_a_value_of_join() -> None:
    assert parse_join_addresses("etcd://a:2379,b:2379/prefix") == [Address("a", 2379), Address("b", 2379)]
    assert parse_join_addresses("a,b:1") == [Address("a"), Address("b", 1)]


def test_a_manager_has_a_default_port() -> None:
    assert find_manager_address(config(bind="10.0.0.1")) == Address("10.0.0.1", 7400)
    assert find_manager_address(config(bind="10.0.0.1:9")) == Address("10.0.0.1", 9)
    assert find_manager_address(config("10.0.0.7")) == Address("10.0.0.7", 7400)
    assert find_advertised_manager(config(bind="10.0.0.1"), 7400) == "10.0.0.1:7400"
    assert find_advertised_manager(config(bind="0.0.0.0", advertise="m1"), 7400) == "m1:7400"
    assert find_advertised_manager(config(bind="0.0.0.0", advertise="m1:9"), 7400) == "m1:9"
    with pytest.raises(ConfigError, match="--advertise"):
        find_advertised_manager(config(bind="0.0.0.0"), 7400)


@pytest.mark.parametrize(
    ("cluster", "number", "endpoint"),
    [
        ({"join": "m", "bind": "10.0.0.2"}, 0, Endpoint("tcp://10.0.0.2:7401", "10.0.0.2")),
        ({"join": "m", "bind": "10.0.0.2"}, 1, Endpoint("tcp://10.0.0.2:7403", "10.0.0.2")),
        ({"join": "m", "bind": "10.0.0.2:9000"}, 1, Endpoint("tcp://10.0.0.2:9002", "10.0.0.2")),
        ({"join": "m", "bind": "10.0.0.2:0"}, 1, Endpoint("tcp://10.0.0.2:0", "10.0.0.2")),
        ({"bind": "10.0.0.2"}, 0, Endpoint("tcp://10.0.0.2:7401", "10.0.0.2")),
        ({"bind": "10.0.0.2:9000"}, 0, Endpoint("tcp://10.0.0.2:9001", "10.0.0.2")),
        ({"join": "m", "bind": "0.0.0.0", "advertise": "g"}, 0, Endpoint("tcp://0.0.0.0:7401", "g")),
        ({"join": "m", "bind": "0.0.0.0", "advertise": "g:5"}, 1, Endpoint("tcp://0.0.0.0:7403", "g", 7)),
        ({"join": "m", "bind": "fd00::2"}, 0, Endpoint("tcp://[fd00::2]:7401", "fd00::2")),
    ],
)
def test_gateways_have_consecutive_ports(cluster: dict[str, str], number: int, endpoint: Endpoint) -> None:
    assert find_gateway_endpoint(config(**cluster), number) == endpoint


def test_a_wildcard_is_advertised_as_the_address_that_reaches_the_manager() -> None:
    found = find_gateway_endpoint(config(join="192.0.2.1", bind="0.0.0.0"), 0)
    assert found.host not in ("", "0.0.0.0")


def test_clients_get_an_address_that_they_can_reach() -> None:
    assert find_clients_address(config("10.0.0.2", join="m"), 50051) == "10.0.0.2:50051"
    assert find_clients_address(config("0.0.0.0", join="m", advertise="g:7401"), 50051) == "g:50051"
    assert not find_clients_address(config("0.0.0.0"), 1).startswith("0.0.0.0")


@pytest.mark.parametrize("cluster", [{"bind": "10.0.0.1"}, {"bind": "0.0.0.0:7400"}, {"bind": "box"}])
def test_addresses_beyond_loopback_need_keys_or_insecure(cluster: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        check_bind(config(**cluster))
    check_bind(load_config(insecure=True, cluster=cluster))


def test_loopback_needs_no_keys() -> None:
    check_bind(config(bind="127.0.0.1:7400"))
    check_bind(config())


def test_a_role_needs_the_managers_address() -> None:
    with pytest.raises(ConfigError, match="--join"):
        check_join(config())
    with pytest.raises(ConfigError, match="a listening address only"):
        check_join(config(join="0.0.0.0"))
    with pytest.raises(ConfigError, match="is not an address"):
        check_join(config(join="host:port"))
    check_join(config(join="10.0.0.1,10.0.0.2"))


@pytest.mark.parametrize("cluster", [{"bind": "host:port"}, {"node": "a/b"}, {"node": "under_score"}, {"jion": "a"}])
def test_contradictory_settings_are_refused(cluster: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        load_config(cluster=cluster)


def test_settings_of_a_cluster_come_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("cluster:\n  node: n1\n  join: [10.0.0.1, '10.0.0.2:7400']\n")
    assert load_config(file).cluster.join == "10.0.0.1,10.0.0.2:7400"
    monkeypatch.setenv("PENSTOCK_CLUSTER__JOIN", "etcd://a:1,b:1")
    found = load_config(file, cluster={"node": "n2"}).cluster
    assert (found.node, found.join) == ("n2", "etcd://a:1,b:1")


def test_the_written_configuration_is_private_and_has_no_secrets(tmp_path: Path) -> None:
    secrets = {"api_key": "psk_of_this_host", "s3": {"secret_access_key": "of-the-bucket"}}
    given = load_config(None, **secrets, access={"secret": "of-the-whole-cluster", "limits_url": "redis://:word@h:1/0"})
    paths = ServerPaths(tmp_path)
    paths.write_config(given)
    assert paths.config.stat().st_mode & 0o077 == 0
    assert paths.read_config().access.limits_url == "redis://:word@h:1/0"
    text = paths.config.read_text()
    assert not [each for each in ("psk_of_this_host", "of-the-bucket", "of-the-whole-cluster") if each in text]
    paths.write_config(given, only={"data_dir"})
    assert json.loads(paths.config.read_text()) == {"data_dir": str(Path.cwd() / "penstock-data")}
