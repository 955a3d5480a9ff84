"""Addresses as people write them."""

import pytest

from penstock.core.cluster.addresses import Address, is_loopback, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1", Address("10.0.0.1")),
        ("10.0.0.1:7400", Address("10.0.0.1", 7400)),
        ("gpu-box:0", Address("gpu-box", 0)),
        ("::1", Address("::1")),
        ("[fd00::1]:7400", Address("fd00::1", 7400)),
        ("[fd00::1]", Address("fd00::1")),
    ],
)
def test_addresses_with_host_and_port_are_parsed(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", ":7400", "host:port", "host:70000", "http://host", "[::1", "[::1]7400", "a b"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        parse_address(text)


def test_a_given_port_is_kept() -> None:
    assert Address("h").with_default_port(7400) == Address("h", 7400)
    assert Address("h", 1).with_default_port(7400) == Address("h", 1)


def test_loopback_hosts_are_recognized() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.3.2.1", "::1")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "name", "")] == [False] * 5
