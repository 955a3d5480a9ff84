"""A certificate authority for development and private clusters: issues certificates for servers and clients."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, CertificateBuilder

CA_FILE, CA_KEY_FILE = "ca.pem", "ca-key.pem"
CLOCK_SKEW = timedelta(minutes=5)  # clocks of other hosts may be this much behind
_MAX_NAME_CHARS = 64  # X.509's limit for a common name
_ELLIPTIC_CURVE = ec.SECP256R1()  # accepted by gRPC, browsers and OpenSSL


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """An issued certificate and its key."""

    cert: Path
    key: Path
    names: tuple[str, ...]
    expires_at: datetime


class Authority:
    """Issues certificates from a folder with the authority's certificate and key; writes them to the same folder."""

    def __init__(self, folder: Path, cert: "Certificate", key: ec.EllipticCurvePrivateKey) -> None:
        self.folder = folder
        self._cert = cert
        self._key = key

    @classmethod
    def create(cls, folder: Path, name: str, days: int, now: datetime | None = None) -> "Authority":
        """Create the authority's certificate and key. Raise ConfigError if the folder already has an authority."""
        if (folder / CA_FILE).exists() or (folder / CA_KEY_FILE).exists():
            raise ConfigError(
                f"{folder} already contains an authority ({CA_FILE}): choose another folder, or delete it"
            )
        key, at = ec.generate_private_key(_ELLIPTIC_CURVE), now or datetime.now(UTC)
        builder = _create_certificate_builder(name, name, key.public_key(), at, timedelta(days=days))
        usage = _build_key_usage(key_cert_sign=True, crl_sign=True)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        cert = builder.sign(key, hashes.SHA256())
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create {folder}: {error.strerror}") from error
        _write(folder / CA_KEY_FILE, _encode_pem(key), 0o600)
        _write(folder / CA_FILE, cert.public_bytes(Encoding.PEM), 0o644)
        return cls(folder, cert, key)

    @classmethod
    def open(cls, folder: Path) -> "Authority":
        try:
            cert = x509.load_pem_x509_certificate((folder / CA_FILE).read_bytes())
            key = load_pem_private_key((folder / CA_KEY_FILE).read_bytes(), None)
        except OSError as error:
            raise ConfigError(
                f"{folder} contains no authority ({error.strerror}): create one with penstock certs init"
            ) from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{folder}: {CA_FILE} or {CA_KEY_FILE} cannot be read: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{folder}/{CA_KEY_FILE} is not a key created by penstock certs init")
        return cls(folder, cert, key)

    def issue(
        self,
        name: str,
        hosts: Sequence[str] = (),
        days: float = 365,
        is_client: bool = False,
        now: datetime | None = None,
    ) -> IssuedCertificate:
        """Issue a certificate for a name and hosts, and replace an earlier certificate with the same name.

        Servers may read the files during the replacement. If `is_client`, the certificate is not valid for servers.
        """
        if not name or len(name) > _MAX_NAME_CHARS or "/" in name or name.startswith("."):
            raise ConfigError(
                f"invalid name '{name[:80]}': use 1 to {_MAX_NAME_CHARS} characters, without slashes or a leading dot"
            )
        if f"{name}.pem" == CA_FILE:
            raise ConfigError(f"the name '{name}' is the authority's own: choose another name")
        key, at = ec.generate_private_key(_ELLIPTIC_CURVE), now or datetime.now(UTC)
        issuer = self._cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        builder = _create_certificate_builder(name, str(issuer), key.public_key(), at, timedelta(days=days))
        names = list(dict.fromkeys([name, *hosts]))
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if not is_client:
            purposes.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_build_key_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_parse_alternative_name(each) for each in names]), False
        )
        of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        cert = builder.add_extension(of_issuer, critical=False).sign(self._key, hashes.SHA256())
        issued = IssuedCertificate(
            self.folder / f"{name}.pem", self.folder / f"{name}-key.pem", tuple(names), cert.not_valid_after_utc
        )
        # A server that reads the files between the two writes finds that they do not match, and reads them again.
        _write(issued.key, _encode_pem(key), 0o600)
        _write(issued.cert, cert.public_bytes(Encoding.PEM), 0o644)
        return issued


def _create_certificate_builder(
    name: str, issuer: str, key: ec.EllipticCurvePublicKey, valid_from: datetime, lifetime: timedelta
) -> "CertificateBuilder":
    builder = x509.CertificateBuilder(
        _build_common_name(issuer), _build_common_name(name), key, x509.random_serial_number()
    )
    return builder.not_valid_before(valid_from - CLOCK_SKEW).not_valid_after(valid_from + lifetime)


def _build_common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _build_key_usage(**allowed_uses: bool) -> x509.KeyUsage:
    usual = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(**usual | allowed_uses)


def _parse_alternative_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.RFC822Name(text) if "@" in text else x509.DNSName(text)
    except ValueError as error:
        raise ConfigError(f"'{text}' cannot be a name in a certificate: {error}") from error


def _encode_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace the file atomically, because a server may be reading the file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as opened:
            opened.write(content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
