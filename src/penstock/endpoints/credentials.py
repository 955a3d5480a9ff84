"""The credentials that a caller sends: keys or tokens in headers, or a client certificate. Only parsing; no checks.

Accepted headers, and gRPC metadata of the same names: `authorization: Bearer KEY`, `authorization: Basic` with the key
as password (which browsers send), and `x-api-key: KEY`.
"""

from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Iterable
from typing import NamedTuple

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"
CREDENTIAL_HEADERS = frozenset((AUTHORIZATION, API_KEY))
_NAMES_AS_BYTES = {AUTHORIZATION.encode(): AUTHORIZATION, API_KEY.encode(): API_KEY}


class Credentials(NamedTuple):
    keys: tuple[str, ...] = ()  # keys or tokens, without duplicates
    certificate: tuple[str, ...] = ()  # the names in a verified client certificate
    fault: str = ""  # why a header cannot be parsed

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[bytes, bytes]], certificate: tuple[str, ...] = ()) -> "Credentials":
        """Parse HTTP headers, whose names must be in lower case."""
        given = [pair for pair in headers if pair[0] in _NAMES_AS_BYTES]
        return _parse_credentials(
            [(_NAMES_AS_BYTES[name], value.decode("latin-1")) for name, value in given], certificate
        )

    @classmethod
    def from_metadata(
        cls, metadata: Iterable[tuple[str, str | bytes]], certificate: tuple[str, ...] = ()
    ) -> "Credentials":
        given = [pair for pair in metadata if pair[0] in CREDENTIAL_HEADERS]
        return _parse_credentials([(name, value) for name, value in given if isinstance(value, str)], certificate)


NO_CREDENTIALS = Credentials()


def _parse_credentials(headers: list[tuple[str, str]], certificate: tuple[str, ...]) -> Credentials:
    if not headers:
        return Credentials(certificate=certificate) if certificate else NO_CREDENTIALS
    keys: dict[str, None] = {}
    for name, value in headers:
        text = value.strip()
        if name == AUTHORIZATION:
            scheme, _, rest = text.partition(" ")
            if scheme == "Bearer" or scheme.lower() == "bearer":
                text = rest.strip()
            elif scheme.lower() == "basic":
                text = _parse_password(rest.strip())
            elif scheme:
                return Credentials(fault="'authorization' must be 'Bearer KEY', or 'Basic' with the key as password")
        if text:
            keys[text] = None
    return Credentials(tuple(keys), certificate)


def _parse_password(encoded: str) -> str:
    """Return the password of Basic credentials, or the user name if the password is empty."""
    try:
        user, _, password = b64decode(encoded, validate=True).decode("latin-1").partition(":")
    except (NotBase64, ValueError):
        return encoded  # not a valid key, so it is refused as unknown
    return password or user
