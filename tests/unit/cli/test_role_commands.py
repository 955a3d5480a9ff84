"""Commands that run roles of a cluster: the configuration that their shared options give."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import main as cli
from penstock.core.config import Config

SHARED = (
    *("--join", "etcd://m:2379", "--node", "n1", "--bind", "10.0.0.1", "--advertise", "m1", "--insecure", "--keys"),
    *("--key-file", "key", "--data-dir", "kept"),
)
HEALTH = ("--health-host", "10.0.0.1", "--health-port", "1", "--health-grpc-port", "2")


def started(monkeypatch: pytest.MonkeyPatch, place: str, *words: str) -> Config:
    """Return the configuration that a command would run with."""
    found: list[Any] = []
    monkeypatch.setattr(place, lambda first, *_, **__: found.append(first))
    result = CliRunner().invoke(cli.app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    config: Config = getattr(found[0], "config", found[0])
    return config


@pytest.mark.parametrize(
    ("command", "place", "own"),
    [
        ("manager", "penstock.app.manager_role.run_manager", HEALTH),
        ("worker", "penstock.app.worker_role.run_worker", HEALTH),
        ("gateway", "penstock.app.gateway.gateway_role.run_gateway", ()),
        ("serve", "penstock.app.local_server.run_serve", (*HEALTH, "--gateways", "1", "--workers", "1")),
    ],
)
def test_every_role_of_a_cluster_has_the_same_options(
    command: str, place: str, own: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("cluster: {curve: false}")
    config = started(monkeypatch, place, command, *SHARED, "--config", str(file), *own)
    cluster = config.cluster.model_dump(include={"join", "node", "bind", "advertise", "curve"})
    assert list(cluster.values()) == ["n1", "etcd://m:2379", "10.0.0.1", False, "m1"]
    assert (config.insecure, config.access.keys, config.api_key_file) == (True, "required", Path("key"))
    assert config.data_dir == Path("kept")
    if own:
        assert config.health.model_dump() == {"host": "10.0.0.1", "http_port": 1, "grpc_port": 2}


def test_a_fleet_requires_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []

    def up(address: str, plan: Any) -> list[dict[str, Any]]:
        plans.append(plan)
        return []

    monkeypatch.setattr("penstock.app.fleet_control.start_fleet", up)
    words = ["fleet", "up", "--join", "10.0.0.1", "--keys", "--key-file", "/etc/penstock/key"]
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    config = plans[0].config
    assert (config.access.keys, config.api_key_file) == ("required", Path("/etc/penstock/key"))
    plans[0].check()
