"""A certificate, its key and the authorities that are trusted: the files that say so, read and checked."""

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

OF_OWNER, OF_ANOTHER = 0o077, 0o037  # what may not be allowed on a key of our own; root's may be for our group


QUERY = ("cert", "key", "ca")  # what a URL may have behind its question mark
Stamps = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; what is empty is not there."""

    cert: str = ""  # with the certificates between it and its authority's
    key: str = ""
    ca: str = ""  # of the authorities that others' certificates come from; empty: the system's

    @property
    def is_empty(self) -> bool:
        return not (self.cert or self.ca)

    @classmethod
    def of(cls, settings: "TlsSettings") -> "TlsFiles":
        return cls(settings.cert, settings.key, settings.ca)

    @classmethod
    def of_query(cls, query: Mapping[str, str]) -> "TlsFiles":
        """Of a store's URL: `?ca=FILE&cert=FILE&key=FILE`."""
        return cls(*(query.get(name, "") for name in QUERY))

    def stamps(self) -> Stamps:
        """Another whenever one of them was written or exchanged."""
        return tuple(_stamp(path) for path in (self.cert, self.key, self.ca))


NO_FILES = TlsFiles()  # everything is plain


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What the files say."""

    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ca: bytes = b""
    expires_at: float = 0.0  # of the certificate, in seconds since 1970


def read_files(files: TlsFiles, now: datetime | None = None, setting: str = "tls") -> TlsMaterial:
    """Raises ConfigError, which says what is wrong with which of them."""
    if bool(files.cert) != bool(files.key):
        raise ConfigError(f"{setting}: a certificate and its key belong together: give both, {setting}.cert and .key")
    ca = trusted(files.ca, f"{setting}.ca")
    if files.ca:
        _check_authorities(ca, files.ca, f"{setting}.ca")
    if not files.cert:
        return TlsMaterial(ca=ca)
    _check_secrecy(files.key, f"{setting}.key")
    cert, key = read_pem(files.cert, f"{setting}.cert"), read_pem(files.key, f"{setting}.key")
    leaf = _parse(cert, files.cert, f"{setting}.cert")
    _check_time(leaf, now or datetime.now(UTC), files.cert, f"{setting}.cert")
    _check_pair(leaf, key, files)
    return TlsMaterial(cert, key, ca, leaf.not_valid_after_utc.timestamp())


def trusted(ca: str, setting: str = "the authority") -> bytes:
    """Certificates of the authorities; the system's where no file is named."""
    return read_pem(ca, setting) if ca else _of_system()


def read_pem(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error


def _of_system() -> bytes:
    """Empty where the system keeps none in one file: then there are those that the libraries bring."""
    found = ssl.get_default_verify_paths().cafile
    try:
        return Path(found).read_bytes() if found else b""
    except OSError:
        return b""


def _stamp(path: str) -> tuple[int, ...]:
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
    if found.st_mode & (OF_OWNER if found.st_uid == os.geteuid() else OF_ANOTHER):
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{setting}: others may read or write {path} (its mode is {mode:04o}): chmod 600 {path}")


def _check_authorities(ca: bytes, path: str, setting: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode())
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{setting}: {path} has no certificate of an authority in PEM") from error


def _parse(cert: bytes, path: str, setting: str) -> "Certificate":
    # Here and not above: few processes have a certificate.
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(cert)[0]
    except ValueError as error:
        raise ConfigError(f"{setting}: {path} has no certificate in PEM") from error


def _check_time(leaf: "Certificate", now: datetime, path: str, setting: str) -> None:
    if leaf.not_valid_after_utc <= now:
        raise ConfigError(f"{setting}: the certificate in {path} expired at {_said(leaf.not_valid_after_utc)}")
    if leaf.not_valid_before_utc > now:
        raise ConfigError(f"{setting}: the certificate in {path} is valid only from {_said(leaf.not_valid_before_utc)}")


def _check_pair(leaf: "Certificate", key: bytes, files: TlsFiles) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    try:
        private = load_pem_private_key(key, None)
    except TypeError as error:
        raise ConfigError(f"the key in {files.key} is encrypted: give one that is not, for its owner alone") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{files.key} has no private key in PEM") from error
    if not isinstance(private, RSAPrivateKey | EllipticCurvePrivateKey):
        raise ConfigError(f"the key in {files.key} is neither RSA nor ECDSA, and gRPC takes no other")
    spki = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if private.public_key().public_bytes(*spki) != leaf.public_key().public_bytes(*spki):
        raise ConfigError(f"the key in {files.key} does not match the certificate in {files.cert}")


def _said(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"
