"""The principals that certificates authenticate, from the setting `tls.principals`. Pure: no I/O."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from penstock.core.principals import Principal, Scope

CERTIFICATE = "certificate/"  # prefix of the id that a certificate's principal has in place of a key id


class CertificatePrincipals:
    def __init__(self, scopes: Mapping[str, Sequence[Scope]]) -> None:
        """Set the scopes by name or pattern, such as `*.workers.example`. Exact names take precedence."""
        self._scopes = {pattern: frozenset(given) for pattern, given in scopes.items()}

    def find_principal(self, names: Sequence[str]) -> Principal | None:
        """Return the principal of the first known name, or None if no name is known."""
        for name in names:
            if name in self._scopes:
                return Principal(name, CERTIFICATE + name, self._scopes[name])
        for name in names:
            for pattern, scopes in self._scopes.items():
                if fnmatchcase(name, pattern):
                    return Principal(name, CERTIFICATE + name, scopes)
        return None
