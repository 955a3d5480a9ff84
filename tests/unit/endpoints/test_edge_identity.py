"""The identity of clients in the headers of the edge."""

from pathlib import Path
from urllib.parse import quote

import pytest

from penstock.endpoints.edge_identity import read_header_identity, read_metadata_identity
from penstock.wire.credentials.authority import Authority


@pytest.mark.parametrize(
    ("given", "client", "peer"),
    [
        ("10.0.0.7:50312", ("10.0.0.7", 50312), "ipv4:10.0.0.7:50312"),
        ("[2001:db8::7]:50312", ("2001:db8::7", 50312), "ipv6:[2001:db8::7]:50312"),
        ("[::ffff:10.0.0.7]:50312", ("10.0.0.7", 50312), "ipv4:10.0.0.7:50312"),
        ("/tmp/a-socket", ("", 0), "ipv4::0"),
    ],
)
def test_the_client_is_the_address_that_the_edge_names(given: str, client: tuple[str, int], peer: str) -> None:
    found = read_metadata_identity([("x-api-key", "k"), ("x-penstock-client", given)])
    assert (found.client, found.peer) == (client, peer)
    assert read_header_identity([(b"x-penstock-client", given.encode())]).client == client


def test_the_names_are_those_of_the_certificate(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "a test's authority", 10)
    authority.issue("alice@example.com", ("alice.example.com", "10.0.0.7"), is_client=True)
    pem = (tmp_path / "alice@example.com.pem").read_text()
    names = read_metadata_identity([("x-penstock-certificate", quote(pem))]).certificate
    assert set(names) >= {"alice@example.com", "alice.example.com", "10.0.0.7"}


def test_an_invalid_certificate_has_no_names() -> None:
    assert read_metadata_identity([("x-penstock-certificate", "alice")]).certificate == ()
