"""The choice of Envoy as the entrance of a server."""

import sys
from typing import Any

import pytest

from penstock.core.config import load_config
from penstock.core.errors import ConfigError
from penstock.features.edge.edge_choice import choose_edge

TLS = {"cert": "server.pem", "key": "server-key.pem"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"host": "0.0.0.0", "insecure": True}, "other machines can reach 0.0.0.0"),
        ({"tls": TLS}, "TLS is on"),
        ({"access": {"keys": "required"}}, "keys are required"),
        ({"edge": "envoy"}, "edge is envoy"),
    ],
)
def test_production_has_an_edge(settings: dict[str, Any], reason: str) -> None:
    config = load_config(**settings)
    choice = choose_edge(config, config.host)
    assert (choice.is_envoy, choice.reason) == (True, reason)


@pytest.mark.parametrize(
    "settings", [{}, {"edge": "none", "tls": TLS}, {"host": "0.0.0.0", "edge_sockets": "/run/penstock"}]
)
def test_no_edge_where_none_is_needed_or_wanted(settings: dict[str, Any]) -> None:
    config = load_config(**settings)
    choice = choose_edge(config, config.host)
    assert not choice.is_envoy
    assert not choice.is_missing


def test_a_key_that_exists_at_the_start_asks_for_an_edge() -> None:
    assert choose_edge(load_config(), "127.0.0.1", are_keys_required=True).is_envoy


def test_without_the_package_auto_has_no_edge_and_envoy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envoy", None)
    choice = choose_edge(load_config(tls=TLS), "127.0.0.1")
    assert (choice.is_envoy, choice.is_missing) == (False, True)
    with pytest.raises(ConfigError, match="pip install"):
        choose_edge(load_config(edge="envoy"), "127.0.0.1")
