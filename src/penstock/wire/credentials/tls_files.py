"""Reads and checks the files of a certificate, the certificate's key and the trusted authorities."""

import os
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from penstock.core.config import TlsSettings

# Permission bits that a key file must not have if this process's user owns it, and if another user (such as root) does:
# then the group may read it.
FORBIDDEN_MODE_OF_OWN_FILE, FORBIDDEN_MODE_OF_OTHER_FILE = 0o077, 0o037
URL_PARAMETERS = ("cert", "key", "ca")  # parameters of a store's URL
FileStamps = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the PEM files for TLS. An empty path means that the file is not configured."""

    cert: str = ""  # with the intermediate certificates
    key: str = ""
    ca: str = ""  # the trusted authorities; empty: the system's

    @property
    def is_empty(self) -> bool:
        return not (self.cert or self.ca)

    @classmethod
    def from_settings(cls, settings: "TlsSettings") -> "TlsFiles":
        return cls(settings.cert, settings.key, settings.ca)

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> "TlsFiles":
        """Return the files of a store's URL: `?ca=FILE&cert=FILE&key=FILE`."""
        return cls(*(query.get(name, "") for name in URL_PARAMETERS))

    def read_stamps(self) -> FileStamps:
        """Return a value that changes when one of the TLS files is written or replaced."""
        return tuple(_read_stamp(path) for path in (self.cert, self.key, self.ca))


NO_FILES = TlsFiles()  # everything is plaintext


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The contents of TLS files."""

    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ca: bytes = b""
    expires_at: float = 0.0  # when the certificate expires, in seconds since 1970


def read_files(files: TlsFiles, now: datetime | None = None, setting: str = "tls") -> TlsMaterial:
    """Read and check the TLS files. Raises ConfigError with the invalid file and the setting `setting`."""
    if bool(files.cert) != bool(files.key):
        raise ConfigError(f"{setting}: a certificate needs its key: set both {setting}.cert and {setting}.key")
    ca = read_authorities(files.ca, f"{setting}.ca")
    if files.ca:
        _check_authorities(ca, files.ca, f"{setting}.ca")
    if not files.cert:
        return TlsMaterial(ca=ca)
    _check_secrecy(files.key, f"{setting}.key")
    cert, key = read_pem(files.cert, f"{setting}.cert"), read_pem(files.key, f"{setting}.key")
    leaf = _parse_certificate(cert, files.cert, f"{setting}.cert")
    _check_time(leaf, now or datetime.now(UTC), files.cert, f"{setting}.cert")
    _check_pair(leaf, key, files)
    return TlsMaterial(cert, key, ca, leaf.not_valid_after_utc.timestamp())


def read_authorities(ca: str, setting: str = "the authority") -> bytes:
    """Return the certificates of the trusted authorities, from the file `ca`, or of the system if `ca` is empty."""
    return read_pem(ca, setting) if ca else _read_system_authorities()


def read_pem(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error


def _read_system_authorities() -> bytes:
    """Return the system's trusted authorities; empty if no single file has them, so that TLS libraries search."""
    found = ssl.get_default_verify_paths().cafile
    try:
        return Path(found).read_bytes() if found else b""
    except OSError:
        return b""


def _read_stamp(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path) if path else None
    except OSError:
        return (-1,)
    return () if found is None else (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)


def _check_secrecy(path: str, setting: str) -> None:
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    if found.st_mode & (FORBIDDEN_MODE_OF_OWN_FILE if found.st_uid == os.geteuid() else FORBIDDEN_MODE_OF_OTHER_FILE):
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{setting}: other users may access {path} (its mode is {mode:04o}): chmod 600 {path}")


def _check_authorities(ca: bytes, path: str, setting: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode())
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{setting}: {path} contains no certificate of an authority in PEM format") from error


def _parse_certificate(cert: bytes, path: str, setting: str) -> "Certificate":
    # Imported here because it is slow to import and few processes have a certificate.
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(cert)[0]
    except ValueError as error:
        raise ConfigError(f"{setting}: {path} contains no certificate in PEM format") from error


def _check_time(leaf: "Certificate", now: datetime, path: str, setting: str) -> None:
    if leaf.not_valid_after_utc <= now:
        raise ConfigError(f"{setting}: the certificate in {path} expired at {_format_time(leaf.not_valid_after_utc)}")
    if leaf.not_valid_before_utc > now:
        raise ConfigError(
            f"{setting}: the certificate in {path} is valid only from {_format_time(leaf.not_valid_before_utc)}"
        )


def _check_pair(leaf: "Certificate", key: bytes, files: TlsFiles) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    try:
        private = load_pem_private_key(key, None)
    except TypeError as error:
        raise ConfigError(
            f"the key in {files.key} is encrypted: decrypt it and restrict its file to mode 600"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{files.key} contains no private key in PEM format") from error
    if not isinstance(private, RSAPrivateKey | EllipticCurvePrivateKey):
        raise ConfigError(f"the key in {files.key} is neither RSA nor ECDSA: gRPC supports no other kind")
    spki = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if private.public_key().public_bytes(*spki) != leaf.public_key().public_bytes(*spki):
        raise ConfigError(f"the key in {files.key} does not match the certificate in {files.cert}")


def _format_time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"
