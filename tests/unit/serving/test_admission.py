"""Admission limits, and the release of admitted requests."""

from dataclasses import dataclass

import pytest

from penstock.core.config import Limits
from penstock.core.errors import Draining, Overloaded, RequestTooLarge
from penstock.core.requests import InferRequest
from penstock.core.tensors import Tensor
from penstock.endpoints.held_bytes import HeldBytes
from penstock.serving.admission import Admission


def request(size: int = 10, rows: int = 1, client: str = "") -> InferRequest:
    return InferRequest("m", [Tensor("x", "FP32", (rows, 1), b"")], size_bytes=size, client=client)


def test_requests_and_bytes_in_flight_are_limited_and_released() -> None:
    admission = Admission(Limits(max_message_bytes=2048, max_inflight_bytes=3000, max_inflight_requests=3))
    first = request(2000)
    admission.admit(first)
    with pytest.raises(Overloaded, match="bytes"):
        admission.admit(request(1500))
    admission.admit(request(1))
    admission.admit(request(1))
    with pytest.raises(Overloaded, match="requests"):
        admission.admit(request(1))
    admission.release(first)
    admission.admit(request(1500))
    assert (admission.inflight_bytes, admission.inflight_requests) == (1502, 3)


def test_a_message_over_the_limit_never_fits() -> None:
    with pytest.raises(RequestTooLarge) as caught:
        Admission(Limits(max_message_bytes=1024)).admit(request(1025))
    assert not caught.value.is_retryable


def test_rows_are_limited() -> None:
    admission = Admission(Limits(max_rows=4))
    admission.check_rows(request(rows=4))
    with pytest.raises(RequestTooLarge, match="5 rows"):
        admission.check_rows(request(rows=5))


def test_draining_refuses_all_requests() -> None:
    admission = Admission(Limits())
    admission.is_draining = True
    with pytest.raises(Draining):
        admission.admit(request())


def test_an_address_is_limited_to_its_share() -> None:
    limits = Limits(max_message_bytes=1024, max_inflight_bytes=10_000, max_inflight_requests=10, client_share=0.5)
    admission = Admission(limits)
    mine = [request(client="mine") for _ in range(5)]
    for each in mine:
        admission.admit(each)
    with pytest.raises(Overloaded, match="your address"):
        admission.admit(request(client="mine"))
    other = request(client="other")
    admission.admit(other)
    for each in [*mine, other]:
        admission.release(each)
    for each in [request(1000, client="mine") for _ in range(5)]:
        admission.admit(each)
    with pytest.raises(Overloaded, match="your address"):
        admission.admit(request(1000, client="mine"))


@dataclass(eq=False)
class Client:
    has_given_up: bool = False

    def disconnect_client(self) -> None:
        self.has_given_up = True


def test_the_client_that_holds_bytes_longest_is_ended_to_make_room() -> None:
    held, first, second, third, vast = HeldBytes(100), Client(), Client(), Client(), Client()
    assert held.add(first, 40) == []
    assert held.add(second, 40) == []
    assert held.add(first, 10) == []
    assert held.add(third, 60) == [first]
    held.take(second, 10)
    assert held.bytes == 90
    held.take(second, 30)
    held.take(first, 10)
    assert held.bytes == 60
    held.hold(vast, 101)
    assert (held.bytes, third.has_given_up, vast.has_given_up) == (0, True, True)
