"""The names in a certificate that a caller has shown: its alternative names, then the common one."""

from collections.abc import Iterable, Mapping
from typing import Any

Names = tuple[str, ...]
# What gRPC calls them; the first has all kinds, in the order of the certificate.
_OTHER, _COMMON = "x509_subject_alternative_name", "x509_common_name"


def names_of_transport(transport: Any) -> Names:
    """Of an HTTP connection; empty: none was shown."""
    shown = transport.get_extra_info("ssl_object")
    found = shown.getpeercert() if shown is not None else None
    if not found:
        return ()
    others = [value for _, value in found.get("subjectAltName", ())]
    common = [value for part in found.get("subject", ()) for name, value in part if name == "commonName"]
    return _each_once([*others, *common])


def names_of_call(auth_context: Mapping[str, Iterable[bytes]]) -> Names:
    """Of a gRPC call; empty: none was shown."""
    found = [*auth_context.get(_OTHER, ()), *auth_context.get(_COMMON, ())]
    return _each_once(name.decode("utf-8", "replace") for name in found)


def _each_once(names: Iterable[str]) -> Names:
    return tuple(dict.fromkeys(name for name in names if name))
