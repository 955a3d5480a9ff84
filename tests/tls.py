"""Servers and clients that trust a certificate authority of the tests."""

import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from benchmarks.server import ServerProcess
from penstock.wire.credentials.authority import CA_FILE, Authority
from penstock.wire.credentials.client_tls import create_client_context, create_client_credentials
from penstock.wire.credentials.tls_files import TlsFiles

HOSTS = ("localhost", "127.0.0.1")


class TestAuthority:
    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = Authority.create(folder, "a test's authority", 10)
        self.issue("server", *HOSTS)

    def issue(self, name: str, *hosts: str, is_client: bool = False) -> None:
        self._authority.issue(name, hosts, is_client=is_client)

    @property
    def ca(self) -> str:
        return str(self.folder / CA_FILE)

    def files(self, name: str = "") -> TlsFiles:
        """Return the TLS files of an issued certificate, or those of a client without a certificate."""
        cert, key = (str(self.folder / f"{name}{end}.pem") if name else "" for end in ("", "-key"))
        return TlsFiles(cert, key, self.ca)

    def settings(self, name: str = "server", **further: Any) -> dict[str, Any]:
        files = self.files(name)
        return {"tls": {"cert": files.cert, "key": files.key, "ca": files.ca, **further}}

    def context(self, name: str = "") -> ssl.SSLContext:
        return create_client_context(self.files(name))

    def channel(self, address: str, name: str = "") -> grpc.Channel:
        options = (("grpc.use_local_subchannel_pool", 1),)  # each channel has its own connection
        return grpc.secure_channel(address, create_client_credentials(self.files(name)), options=options)


class TlsServer(ServerProcess):
    def __init__(self, authority: TestAuthority, models: Path, folder: Path, settings: Mapping[str, Any]) -> None:
        self._authority = authority
        super().__init__(models, folder, settings=settings)

    @property
    def http_url(self) -> str:
        return f"https://127.0.0.1:{self.http_port}"

    def _is_ready(self, http: str) -> bool:
        try:
            with urllib.request.urlopen(f"{http}/v2/health/ready", timeout=2, context=self._authority.context()) as at:
                return bool(at.status == 200)
        except OSError:
            return False
