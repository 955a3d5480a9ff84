"""Which gRPC server a door has, and why."""

from typing import Any

import pytest

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.gateway.grpc import choice
from penstock.gateway.grpc.choice import choose_grpc_server

TLS = {"cert": "a.pem", "key": "a-key.pem"}


def config(wanted: str, **given: Any) -> Config:
    return Config.model_validate({"gateway": {"grpc_server": wanted}, **given})


def test_the_native_one_where_it_can_do_what_is_asked_for() -> None:
    assert choose_grpc_server(Config()).is_native
    assert choose_grpc_server(config("native")).is_native
    assert choose_grpc_server(config("native", host="0.0.0.0", insecure=True)).is_native
    assert choose_grpc_server(config("native"), is_asking=True).is_native
    assert not choose_grpc_server(config("grpcio")).is_native
    assert "keys" in choose_grpc_server(Config(), is_asking=True).reason


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tls": TLS}, "no TLS"),
        ({"tls": {**TLS, "ca": "ca.pem", "client_auth": "required"}}, "no TLS"),
        ({"host": "0.0.0.0", "insecure": True}, "other machines"),
    ],
)
def test_grpcio_where_the_native_one_cannot(given: dict[str, Any], why: str) -> None:
    found = choose_grpc_server(config("auto", **given))
    assert (found.server, why in found.reason) == ("grpcio", True)


def test_who_asks_for_what_cannot_be_had_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no TLS"):
        choose_grpc_server(config("native", tls=TLS))
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"penstock-serve\[native\]"):
        choose_grpc_server(config("native"))
    assert "not installed" in choose_grpc_server(Config()).reason
    monkeypatch.undo()
    monkeypatch.setattr(choice, "can_count", lambda: False)
    assert "does not count" in choose_grpc_server(Config()).reason
