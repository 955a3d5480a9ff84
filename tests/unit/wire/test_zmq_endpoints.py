"""Addresses that sockets bind, and addresses that they advertise."""

import pytest

from penstock.wire.zmq_endpoints import Endpoint


@pytest.mark.parametrize(
    ("endpoint", "to_bind", "bound", "reached"),
    [
        (Endpoint("ipc:///tmp/g.ipc"), "ipc:///tmp/g.ipc", "ipc:///tmp/g.ipc", "ipc:///tmp/g.ipc"),
        (Endpoint("tcp://10.0.0.2:7401"), "tcp://10.0.0.2:7401", "tcp://10.0.0.2:7401", "tcp://10.0.0.2:7401"),
        (Endpoint("tcp://0.0.0.0:0", "h2"), "tcp://0.0.0.0:*", "tcp://0.0.0.0:4000", "tcp://h2:4000"),
        (Endpoint("tcp://0.0.0.0:1", "h2", 9), "tcp://0.0.0.0:1", "tcp://0.0.0.0:1", "tcp://h2:9"),
        (Endpoint("tcp://[::]:1", "fd00::2"), "tcp://[::]:1", "tcp://[::]:1", "tcp://[fd00::2]:1"),
    ],
)
def test_the_bound_address_and_the_advertised_address_can_differ(
    endpoint: Endpoint, to_bind: str, bound: str, reached: str
) -> None:
    assert endpoint.to_bind == to_bind
    assert endpoint.make_peer_address(bound) == reached


@pytest.mark.parametrize(
    ("endpoint", "beside"),
    [
        (Endpoint("ipc:///tmp/g.ipc"), Endpoint("ipc:///tmp/g.ipc.beats")),
        (Endpoint("tcp://10.0.0.2:7401"), Endpoint("tcp://10.0.0.2:7402")),
        (Endpoint("tcp://0.0.0.0:7401", "h2", 9), Endpoint("tcp://0.0.0.0:7402", "h2", 10)),
        (Endpoint("tcp://0.0.0.0:0", "h2"), Endpoint("tcp://0.0.0.0:0", "h2")),
    ],
)
def test_the_address_of_heartbeats_is_next_to_that_of_messages(endpoint: Endpoint, beside: Endpoint) -> None:
    assert endpoint.make_heartbeat_endpoint() == beside
