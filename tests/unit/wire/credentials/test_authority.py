"""A private certificate authority: its certificates are trusted by its clients, and only its owner can read its key."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from penstock.core.errors import ConfigError
from penstock.wire.credentials.authority import CA_FILE, CA_KEY_FILE, Authority


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    issued = Authority.create(folder, "an authority", 10).issue("server")
    assert mode(folder) == 0o700
    assert mode(folder / CA_KEY_FILE) == mode(issued.key) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [CA_FILE, CA_KEY_FILE, "server.pem", "server-key.pem"]
    )


def test_a_second_authority_does_not_replace_the_first(tmp_path: Path) -> None:
    Authority.create(tmp_path, "an authority", 10)
    with pytest.raises(ConfigError, match="already contains an authority"):
        Authority.create(tmp_path, "another", 10)


def test_nothing_is_issued_without_an_authority(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="penstock certs init"):
        Authority.open(tmp_path)
    (tmp_path / CA_FILE).write_text("nothing")
    (tmp_path / CA_KEY_FILE).write_text("nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        Authority.open(tmp_path)


def test_a_certificate_has_its_names_dates_and_purposes(tmp_path: Path) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    authority = Authority.create(tmp_path, "an authority", 10)
    issued = authority.issue("server", ["localhost", "127.0.0.1", "::1", "server"], days=2, now=now)
    assert issued.names == ("server", "localhost", "127.0.0.1", "::1")
    assert issued.expires_at == now + timedelta(days=2)
    found = x509.load_pem_x509_certificate(issued.cert.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    purposes = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


def test_a_clients_certificate_cannot_be_used_by_a_server(tmp_path: Path) -> None:
    issued = Authority.create(tmp_path, "an authority", 10).issue("ops@example.com", is_client=True)
    found = x509.load_pem_x509_certificate(issued.cert.read_bytes())
    assert list(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.RFC822Name) == ["ops@example.com"]


def test_a_certificate_of_the_same_name_replaces_the_former(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "an authority", 10)
    first = authority.issue("server").cert.read_bytes()
    again = Authority.open(tmp_path).issue("server")
    assert again.cert.read_bytes() != first
    context = ssl.create_default_context(cafile=tmp_path / CA_FILE)
    context.load_cert_chain(again.cert, again.key)  # they match


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "x" * 65, "ca"])
def test_an_invalid_name_is_refused(tmp_path: Path, name: str) -> None:
    authority = Authority.create(tmp_path, "an authority", 10)
    with pytest.raises(ConfigError, match="name"):
        authority.issue(name)
