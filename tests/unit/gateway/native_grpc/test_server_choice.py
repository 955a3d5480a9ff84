"""The choice between the native gRPC server and grpcio, and its reason."""

from typing import Any

import pytest

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.gateway.native_grpc import server_choice
from penstock.gateway.native_grpc.server_choice import choose_grpc_server

TLS = {"cert": "a.pem", "key": "a-key.pem"}


def config(wanted: str, **given: Any) -> Config:
    return Config.model_validate({"gateway": {"grpc_server": wanted}, **given})


def test_auto_chooses_the_native_server_if_it_supports_the_configuration() -> None:
    assert choose_grpc_server(Config()).is_native
    assert choose_grpc_server(config("native")).is_native
    assert choose_grpc_server(config("native", host="0.0.0.0", insecure=True)).is_native
    assert choose_grpc_server(config("native"), are_keys_required=True).is_native
    assert not choose_grpc_server(config("grpcio")).is_native
    assert "keys" in choose_grpc_server(Config(), are_keys_required=True).reason


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tls": TLS}, "no TLS"),
        ({"tls": {**TLS, "ca": "ca.pem", "client_auth": "required"}}, "no TLS"),
        ({"host": "0.0.0.0", "insecure": True}, "other machines"),
    ],
)
def test_auto_chooses_grpcio_otherwise(given: dict[str, Any], why: str) -> None:
    found = choose_grpc_server(config("auto", **given))
    assert (found.server, why in found.reason) == ("grpcio", True)


def test_configuring_native_fails_if_it_is_not_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no TLS"):
        choose_grpc_server(config("native", tls=TLS))
    monkeypatch.setattr(server_choice, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"penstock-serve\[native\]"):
        choose_grpc_server(config("native"))
    assert "not installed" in choose_grpc_server(Config()).reason
    monkeypatch.undo()
    monkeypatch.setattr(server_choice, "can_count", lambda: False)
    assert "does not count" in choose_grpc_server(Config()).reason
