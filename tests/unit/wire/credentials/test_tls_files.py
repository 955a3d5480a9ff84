"""Certificates, keys and authorities as files: faults are reported before a port opens."""

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.wire.credentials.authority import CA_FILE, Authority
from penstock.wire.credentials.tls_files import TlsFiles, read_files


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority")
    authority = Authority.create(folder, "a test's authority", 10)
    authority.issue("server", ["127.0.0.1"])
    authority.issue("other", ["127.0.0.1"])
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "certs"))


def files(folder: Path, cert: str = "server.pem", key: str = "server-key.pem", ca: str = CA_FILE) -> TlsFiles:
    return TlsFiles(*(str(folder / name) if name else "" for name in (cert, key, ca)))


def test_matching_files_are_read(folder: Path) -> None:
    found = read_files(files(folder))
    assert found.cert == (folder / "server.pem").read_bytes()
    assert found.ca == (folder / CA_FILE).read_bytes()
    assert found.expires_at > datetime.now(UTC).timestamp()


def test_a_key_is_never_printed(folder: Path) -> None:
    found = read_files(files(folder))
    assert b"PRIVATE KEY" in found.key
    assert "PRIVATE KEY" not in repr(found)


def test_an_authority_alone_is_enough_for_a_client(folder: Path) -> None:
    assert read_files(files(folder, "", "")).cert == b""


@pytest.mark.parametrize(
    ("cert", "key", "ca", "said"),
    [
        ("none.pem", "server-key.pem", CA_FILE, "none.pem cannot be read: No such file"),
        ("server.pem", "none.pem", CA_FILE, "none.pem cannot be read: No such file"),
        ("server.pem", "server-key.pem", "none.pem", "tls.ca: .*none.pem cannot be read"),
        ("server.pem", "other-key.pem", CA_FILE, "other-key.pem does not match the certificate in .*server.pem"),
        ("server-key.pem", "server-key.pem", CA_FILE, "contains no certificate in PEM"),
        ("server.pem", "server.pem", CA_FILE, "chmod 600"),
        ("server.pem", "server-key.pem", "server-key.pem", "no certificate of an authority"),
        ("server.pem", "", CA_FILE, "needs its key"),
        ("", "server-key.pem", CA_FILE, "needs its key"),
    ],
)
def test_mismatched_files_are_reported(folder: Path, cert: str, key: str, ca: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_files(files(folder, cert, key, ca))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602])
def test_a_key_that_other_users_can_read_is_refused(folder: Path, mode: int) -> None:
    os.chmod(folder / "server-key.pem", mode)
    with pytest.raises(ConfigError, match=f"its mode is {mode:04o}"):
        read_files(files(folder))


def test_a_certificate_is_refused_before_and_after_its_validity(folder: Path) -> None:
    now = datetime.now(UTC)
    with pytest.raises(ConfigError, match="expired at 20"):
        read_files(files(folder), now + timedelta(days=366))
    with pytest.raises(ConfigError, match="valid only from"):
        read_files(files(folder), now - timedelta(days=1))


def test_an_encrypted_key_is_reported(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    path = folder / "server-key.pem"
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    pkcs8, pem = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
    path.write_bytes(key.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"secret")))
    with pytest.raises(ConfigError, match="is encrypted"):
        read_files(files(folder))


def test_a_rewritten_file_is_a_new_one(folder: Path) -> None:
    before = files(folder).read_stamps()
    assert files(folder).read_stamps() == before
    Authority.open(folder).issue("server", ["127.0.0.1"])
    assert files(folder).read_stamps() != before
    (folder / "server.pem").unlink()
    assert files(folder).read_stamps()[0] == (-1,)
