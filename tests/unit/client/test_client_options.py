"""Addresses, keys and certificates in the options of clients."""

from pathlib import Path
from typing import Any

import pytest

from penstock.client import AsyncClient, Client
from penstock.client.client_options import read_address, read_server
from penstock.core.errors import PenstockError


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("localhost:50051", ("localhost:50051", None)),
        ("https://a.example", ("a.example:50051", True)),
        ("grpcs://[::1]:7/", ("[::1]:7", True)),
        ("http://10.0.0.1:8", ("10.0.0.1:8", False)),
        ("GRPC://a:1", ("a:1", False)),
        ("unix:/run/socket", ("unix:/run/socket", None)),
        ("dns://1.1.1.1/a:1", ("dns://1.1.1.1/a:1", None)),
    ],
)
def test_addresses_are_parsed(address: str, found: tuple[str, bool | None]) -> None:
    assert read_address(address) == found


@pytest.mark.parametrize(
    ("address", "options", "said"),
    [
        ("https://", {}, "HOST:PORT"),
        ("https://a:1/v2", {}, "HOST:PORT"),
        ("https://key@a:1", {}, "HOST:PORT"),
        ("http://a:1", {"tls": True}, "excludes TLS"),
        ("grpc://a:1", {"ca": "ca.pem"}, "excludes"),
        ("a:1", {"ca": "ca.pem", "tls": False}, "excludes"),
        ("a:1", {"cert": "cert.pem"}, "cert and cert_key"),
        ("a:1", {"api_key": "two words"}, "api_key"),
        ("a:1", {"api_key": "schlüssel"}, "api_key"),
        ("a:1", {"ca": Path("nowhere.pem")}, "nowhere.pem"),
    ],
)
def test_contradictory_options_are_reported(address: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PenstockError, match=said) as told:
        Client(address, **options)
    assert "schlüssel" not in told.value.message


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="'key'"):
        read_server("a:1", {"key": "x"})  # type: ignore[typeddict-unknown-key]


async def test_printing_a_client_does_not_show_its_key() -> None:
    async with AsyncClient("a:1", api_key="psk_secret") as client:
        assert "psk_secret" not in repr(client) + repr(vars(client))
