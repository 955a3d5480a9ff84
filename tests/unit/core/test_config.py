"""The configuration: sources of settings and their precedence."""

from pathlib import Path

import pytest

from penstock.core.config import WorkerSettings, load_config
from penstock.core.errors import ConfigError


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("http_port: 1\ngrpc_port: 2\nworkers: 3\nlimits:\n  max_rows: 4\n  max_tokens: 5\n")
    monkeypatch.setenv("PENSTOCK_GRPC_PORT", "20")
    monkeypatch.setenv("PENSTOCK_LIMITS__MAX_ROWS", "40")
    monkeypatch.setenv("PENSTOCK_WORKERS", "30")
    config = load_config(file, workers=33, host=None)
    assert (config.http_port, config.grpc_port, config.workers) == (1, 20, 33)
    assert (config.limits.max_rows, config.limits.max_tokens) == (40, 5)
    assert config.host == "127.0.0.1"


def test_unknown_keys_are_refused_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("http_port: 1\nlimits:\n  max_rowz: 4\n")
    with pytest.raises(ConfigError, match=r"penstock\.yaml:3: unknown key 'limits.max_rowz'"):
        load_config(file)


def test_a_removed_setting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("triggers:\n- command: [x]\n  timeout_s: 2\n")
    with pytest.raises(ConfigError, match=r"penstock\.yaml:3: 'triggers.timeout_s' is no longer a setting"):
        load_config(file)
    monkeypatch.setenv("PENSTOCK_LIMITS__MAX_KEYS", "10")
    with pytest.raises(ConfigError, match=r"PENSTOCK_LIMITS__MAX_KEYS .*'limits.max_keys' is no longer a setting"):
        load_config()


def test_an_impossible_value_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_PLANE__DRAIN_S", "-1")
    with pytest.raises(ConfigError, match="PENSTOCK_DATA_PLANE"):
        load_config()


def test_an_impossible_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="HTTP_PORT"):
        load_config(http_port=70000)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_nothing_more(host: str) -> None:
    config = load_config(host=host)
    assert config.is_local
    config.check_reach()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "0", "192.0.2.1", "gpu-box", "127.0.0.1.evil.example"])
def test_addresses_beyond_loopback_need_keys_or_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        load_config(host=host).check_reach()
    load_config(host=host, insecure=True).check_reach()


def test_beyond_loopback_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("host: 0.0.0.0\n")
    with pytest.raises(ConfigError, match="--insecure"):
        load_config(file).check_reach()
    monkeypatch.setenv("PENSTOCK_HOST", "::")
    with pytest.raises(ConfigError, match="--insecure"):
        load_config().check_reach()
    monkeypatch.setenv("PENSTOCK_INSECURE", "true")
    load_config().check_reach()


def test_names_in_the_environment_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ALLOWED_HOSTS", "penstock, penstock.svc")
    assert load_config().allowed_hosts == ("penstock", "penstock.svc")
    assert load_config(allowed_hosts=["other"]).allowed_hosts == ("other",)


def test_error_messages_contain_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("access:\n  secret: hunter2\n")
    with pytest.raises(ConfigError, match="at least 16 characters") as of_file:
        load_config(file)
    monkeypatch.setenv("PENSTOCK_ACCESS__SECRET", "hunter2")
    with pytest.raises(ConfigError, match="at least 16 characters") as of_environment:
        load_config()
    assert "hunter2" not in f"{of_file.value}{of_environment.value}"


def test_task_processes_share_the_cores_unless_a_number_is_set() -> None:
    assert WorkerSettings().task_processes == "auto"
    assert WorkerSettings().compute_task_processes(1, 16) == 14
    assert WorkerSettings().compute_task_processes(1, 999) == 64
    assert WorkerSettings().compute_task_processes(1000, 16) == WorkerSettings().compute_task_processes(1, 1) == 1
    assert WorkerSettings(task_processes=5).compute_task_processes(2, 4) == 5
    with pytest.raises(ConfigError, match=r"setting PENSTOCK_WORKER__TASK_PROCESSES or its flag: .*, got 0"):
        load_config(worker={"task_processes": 0})


def test_http3_needs_an_edge_with_tls_and_clients_without_certificates() -> None:
    tls = {"cert": "server.pem", "key": "server-key.pem", "ca": "ca.pem"}
    assert load_config(edge_http3=True, tls=tls).edge_http3
    for wrong in ({}, {"tls": tls, "edge": "none"}, {"tls": tls | {"client_auth": "optional"}}):
        with pytest.raises(ConfigError, match=r"^edge_http3 needs an edge and tls\.cert"):
            load_config(edge_http3=True, **wrong)
