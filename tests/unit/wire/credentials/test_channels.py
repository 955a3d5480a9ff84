"""What clients go by, while their certificates are exchanged and where they do not fit."""

import threading
import time
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.wire.credentials.channels import client_context, client_credentials
from penstock.wire.credentials.files import TlsFiles
from tests.tls import TestAuthority


def test_a_certificate_that_is_being_exchanged_is_waited_for(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    files = authority.files("server")
    new_key, old_key = Path(files.key), Path(files.key).read_bytes()
    authority.issue("server")
    coming = new_key.read_bytes()
    new_key.write_bytes(old_key)  # the certificate is there, its key not yet
    new_key.chmod(0o600)

    def finish() -> None:
        time.sleep(0.05)
        new_key.write_bytes(coming)

    finishing = threading.Thread(target=finish)
    finishing.start()
    client_credentials(files)
    client_context(files)
    finishing.join()


def test_what_never_fits_is_told(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    authority.issue("other")
    files, other = authority.files("server"), authority.files("other")
    for wrong in (
        TlsFiles(files.cert, other.key, files.ca),
        TlsFiles(files.cert, str(tmp_path / "nothing"), files.ca),
        TlsFiles(ca=str(tmp_path / "nothing")),
    ):
        with pytest.raises(ConfigError):
            client_context(wrong)
        with pytest.raises(ConfigError):
            client_credentials(wrong)
