"""Certificates of clients during a replacement, and mismatched ones."""

import threading
import time
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.wire.credentials.client_tls import create_client_context, create_client_credentials
from penstock.wire.credentials.tls_files import TlsFiles
from tests.tls import TestAuthority


def test_a_certificate_that_is_being_replaced_is_awaited(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    files = authority.files("server")
    new_key, old_key = Path(files.key), Path(files.key).read_bytes()
    authority.issue("server")
    coming = new_key.read_bytes()
    new_key.write_bytes(old_key)  # the certificate exists, its key does not yet
    new_key.chmod(0o600)

    def finish() -> None:
        time.sleep(0.05)
        new_key.write_bytes(coming)

    finishing = threading.Thread(target=finish)
    finishing.start()
    create_client_credentials(files)
    create_client_context(files)
    finishing.join()


def test_a_permanent_mismatch_is_reported(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    authority.issue("other")
    files, other = authority.files("server"), authority.files("other")
    for wrong in (
        TlsFiles(files.cert, other.key, files.ca),
        TlsFiles(files.cert, str(tmp_path / "nothing"), files.ca),
        TlsFiles(ca=str(tmp_path / "nothing")),
    ):
        with pytest.raises(ConfigError):
            create_client_context(wrong)
        with pytest.raises(ConfigError):
            create_client_credentials(wrong)
