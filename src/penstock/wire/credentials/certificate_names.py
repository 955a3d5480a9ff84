"""The names in a caller's certificate: its alternative names, then its common name."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

CertificateNames = tuple[str, ...]
# gRPC's properties with a caller's names. The first contains all alternative names, in the certificate's order.
_ALTERNATIVE_NAMES, _COMMON_NAME = "x509_subject_alternative_name", "x509_common_name"


def read_transport_names(transport: Any) -> CertificateNames:
    """Return the names in the client certificate of an HTTP connection; empty without a client certificate."""
    tls = transport.get_extra_info("ssl_object")
    found = tls.getpeercert() if tls is not None else None
    if not found:
        return ()
    others = [value for _, value in found.get("subjectAltName", ())]
    common = [value for part in found.get("subject", ()) for name, value in part if name == "commonName"]
    return _remove_duplicates([*others, *common])


def read_call_names(auth_context: Mapping[str, Iterable[bytes]]) -> CertificateNames:
    """Return the names in the client certificate of a gRPC call; empty without a client certificate."""

    found = [*auth_context.get(_ALTERNATIVE_NAMES, ()), *auth_context.get(_COMMON_NAME, ())]
    return _remove_duplicates(name.decode("utf-8", "replace") for name in found)


@lru_cache(4096)
def read_pem_names(quoted: str) -> CertificateNames:
    """Return the names in a PEM certificate that is URL-encoded; empty if the certificate is invalid."""
    from cryptography import x509  # deferred: only servers behind an edge read certificates from headers

    try:
        found = x509.load_pem_x509_certificate(unquote_to_bytes(quoted))
        others = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        others = x509.SubjectAlternativeName([])
    except ValueError:
        return ()
    common = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    kinds = (x509.DNSName, x509.UniformResourceIdentifier, x509.RFC822Name, x509.IPAddress)
    given = [str(each.value) for each in others if isinstance(each, kinds)]
    return _remove_duplicates([*given, *(str(each.value) for each in common)])


def _remove_duplicates(names: Iterable[str]) -> CertificateNames:
    return tuple(dict.fromkeys(name for name in names if name))
