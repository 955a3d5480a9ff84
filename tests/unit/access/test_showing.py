"""What callers show: the ways of sending a key, alone, twice and spoiled."""

from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.access.showing import NOTHING, Shown

KEY = "psk_" + "k" * 43


def basic(text: str) -> bytes:
    return b"Basic " + b64encode(text.encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"authorization", f"Bearer {KEY}".encode()),
        (b"authorization", f"bearer   {KEY} ".encode()),
        (b"authorization", basic(f"anybody:{KEY}")),
        (b"authorization", basic(f":{KEY}")),
        (b"authorization", basic(f"{KEY}:")),
        (b"x-api-key", KEY.encode()),
    ],
)
def test_a_key_may_come_in_several_ways(name: bytes, value: bytes) -> None:
    headers = [(b"host", b"localhost"), (name, value)]
    assert Shown.of_headers(headers).keys == (KEY,)
    assert Shown.of_metadata([(name.decode(), value.decode()), ("x-api-key-bin", b"\xff")]).keys == (KEY,)


def test_nothing_is_shown_by_what_is_empty() -> None:
    assert Shown.of_headers([(b"host", b"x")]) is NOTHING
    assert Shown.of_headers([(b"authorization", b"Bearer "), (b"x-api-key", b"")]).keys == ()
    assert Shown.of_metadata(()) is NOTHING


def test_the_same_key_twice_is_one_and_two_keys_are_two() -> None:
    both = [(b"authorization", b"Bearer " + KEY.encode()), (b"x-api-key", KEY.encode())]
    assert Shown.of_headers(both).keys == (KEY,)
    assert len(Shown.of_headers([*both, (b"x-api-key", b"other")]).keys) == 2


def test_what_cannot_be_read_is_a_fault_or_nobodys_key() -> None:
    assert Shown.of_headers([(b"authorization", b"Digest username=x")]).fault
    assert Shown.of_headers([(b"authorization", b"Basic !!")]).keys == ("!!",)
    assert Shown.of_headers([(b"x-api-key", b"\xff\x00")]).keys == ("\xff\x00",)


def test_a_certificate_stays_beside_a_key() -> None:
    shown = Shown.of_headers([(b"x-api-key", KEY.encode())], ("worker-1",))
    assert (shown.keys, shown.certificate) == ((KEY,), ("worker-1",))
    assert Shown.of_metadata((), ("worker-1",)).certificate == ("worker-1",)


@given(st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key", b"host"]), st.binary(max_size=40))))
def test_whatever_is_sent_can_be_read(headers: list[tuple[bytes, bytes]]) -> None:
    schemes = [(name, b"Basic " + value) for name, value in headers]
    for given_headers in (headers, schemes):
        shown = Shown.of_headers(given_headers)
        assert all(shown.keys)
        assert shown.fault == "" or not shown.keys
