"""A port that is reserved for processes that share it."""

import socket
from contextlib import AsyncExitStack

import pytest

from penstock.app.ports import open_http_socket, reserve_port, reserve_ports
from penstock.core.config import load_config
from penstock.core.errors import ConfigError

HOST = "127.0.0.1"


def test_a_reserved_port_can_be_opened_by_several_gateways_and_by_nobody_else() -> None:
    with reserve_port(HOST, 0, "--http-port") as kept:
        port = kept.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=5)
        with pytest.raises(ConfigError, match=rf"{HOST}:{port}.*choose another --http-port"):
            reserve_port(HOST, port, "--http-port")
        with open_http_socket(HOST, port), open_http_socket(HOST, port):
            for _ in range(8):
                socket.create_connection((HOST, port), timeout=5).close()
            with pytest.raises(ConfigError, match="choose another --grpc-port"):
                reserve_port(HOST, port, "--grpc-port")
        with pytest.raises(ConfigError, match="choose another"):  # no gateway listens at this moment
            reserve_port(HOST, port, "--http-port")
    reserve_port(HOST, port, "--http-port").close()


def test_an_address_of_another_machine_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: Cannot assign requested address"):
        reserve_port("192.0.2.1", 0, "--http-port")


async def test_a_port_for_http3_is_checked_over_udp() -> None:
    tls = {"cert": "server.pem", "key": "server-key.pem"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind((HOST, 0))
        config = load_config(http_port=other.getsockname()[1], grpc_port=0, tls=tls, edge_http3=True)
        async with AsyncExitStack() as stack:
            with pytest.raises(ConfigError, match="over UDP: Address already in use; choose another --http-port"):
                reserve_ports(config, stack)
