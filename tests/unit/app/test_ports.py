"""A port that is kept for those who share it."""

import socket

import pytest

from penstock.app.ports import open_http_socket, reserve_port
from penstock.core.errors import ConfigError

HOST = "127.0.0.1"


def test_a_reserved_port_is_opened_by_several_and_by_nobody_else() -> None:
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
        with pytest.raises(ConfigError, match="choose another"):  # no gateway listens just now
            reserve_port(HOST, port, "--http-port")
    reserve_port(HOST, port, "--http-port").close()


def test_an_address_that_is_not_here_is_told() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: Cannot assign requested address"):
        reserve_port("192.0.2.1", 0, "--http-port")
