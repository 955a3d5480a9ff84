"""Credentials in headers: each way of sending a key, duplicates, and unreadable values."""

from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.endpoints.credentials import NO_CREDENTIALS, Credentials

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
def test_a_key_is_read_from_each_header(name: bytes, value: bytes) -> None:
    headers = [(b"host", b"localhost"), (name, value)]
    assert Credentials.from_headers(headers).keys == (KEY,)
    assert Credentials.from_metadata([(name.decode(), value.decode()), ("x-api-key-bin", b"\xff")]).keys == (KEY,)


def test_empty_headers_have_no_credentials() -> None:
    assert Credentials.from_headers([(b"host", b"x")]) is NO_CREDENTIALS
    assert Credentials.from_headers([(b"authorization", b"Bearer "), (b"x-api-key", b"")]).keys == ()
    assert Credentials.from_metadata(()) is NO_CREDENTIALS


def test_duplicate_keys_count_once() -> None:
    both = [(b"authorization", b"Bearer " + KEY.encode()), (b"x-api-key", KEY.encode())]
    assert Credentials.from_headers(both).keys == (KEY,)
    assert len(Credentials.from_headers([*both, (b"x-api-key", b"other")]).keys) == 2


def test_unreadable_credentials_are_a_fault_or_an_unknown_key() -> None:
    assert Credentials.from_headers([(b"authorization", b"Digest username=x")]).fault
    assert Credentials.from_headers([(b"authorization", b"Basic !!")]).keys == ("!!",)
    assert Credentials.from_headers([(b"x-api-key", b"\xff\x00")]).keys == ("\xff\x00",)


def test_a_certificate_and_a_key_are_both_read() -> None:
    credentials = Credentials.from_headers([(b"x-api-key", KEY.encode())], ("worker-1",))
    assert (credentials.keys, credentials.certificate) == ((KEY,), ("worker-1",))
    assert Credentials.from_metadata((), ("worker-1",)).certificate == ("worker-1",)


@given(st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key", b"host"]), st.binary(max_size=40))))
def test_arbitrary_headers_can_be_read(headers: list[tuple[bytes, bytes]]) -> None:
    schemes = [(name, b"Basic " + value) for name, value in headers]
    for given_headers in (headers, schemes):
        credentials = Credentials.from_headers(given_headers)
        assert all(credentials.keys)
        assert credentials.fault == "" or not credentials.keys
