"""What a caller shows of itself: keys or tokens in its headers, or its certificate. Reads; knows nobody.

`authorization: Bearer KEY`, `authorization: Basic` with the key as password (what browsers send), `x-api-key: KEY`;
gRPC's metadata has the same names.
"""

from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Iterable
from typing import NamedTuple

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"
NAMES = frozenset((AUTHORIZATION, API_KEY))
_NAMES_AS_BYTES = {AUTHORIZATION.encode(): AUTHORIZATION, API_KEY.encode(): API_KEY}


class Shown(NamedTuple):
    keys: tuple[str, ...] = ()  # keys or tokens, those that are equal once
    certificate: tuple[str, ...] = ()  # the names in one that was verified
    fault: str = ""  # why what was shown cannot be read

    @classmethod
    def of_headers(cls, headers: Iterable[tuple[bytes, bytes]], certificate: tuple[str, ...] = ()) -> "Shown":
        """Names are in lower case."""
        given = [pair for pair in headers if pair[0] in _NAMES_AS_BYTES]
        return _read([(_NAMES_AS_BYTES[name], value.decode("latin-1")) for name, value in given], certificate)

    @classmethod
    def of_metadata(cls, metadata: Iterable[tuple[str, str | bytes]], certificate: tuple[str, ...] = ()) -> "Shown":
        given = [pair for pair in metadata if pair[0] in NAMES]
        return _read([(name, value) for name, value in given if isinstance(value, str)], certificate)


NOTHING = Shown()


def _read(given: list[tuple[str, str]], certificate: tuple[str, ...]) -> Shown:
    if not given:
        return Shown(certificate=certificate) if certificate else NOTHING
    keys: dict[str, None] = {}
    for name, value in given:
        text = value.strip()
        if name == AUTHORIZATION:
            scheme, _, rest = text.partition(" ")
            if scheme == "Bearer" or scheme.lower() == "bearer":
                text = rest.strip()
            elif scheme.lower() == "basic":
                text = _password(rest.strip())
            elif scheme:
                return Shown(fault="'authorization' must be 'Bearer KEY', or 'Basic' with the key as password")
        if text:
            keys[text] = None
    return Shown(tuple(keys), certificate)


def _password(encoded: str) -> str:
    """The user's name where there is no password, and nothing where it cannot be read."""
    try:
        user, _, password = b64decode(encoded, validate=True).decode("latin-1").partition(":")
    except (NotBase64, ValueError):
        return encoded  # is nobody's key
    return password or user
