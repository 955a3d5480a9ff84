"""Which principal the names of a certificate stand for. Decides only."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from penstock.core.principals import Principal, Scope

CERTIFICATE = "certificate/"  # in place of a key's id: what belongs to one owner is no other's


class CertificateHolders:
    def __init__(self, scopes: Mapping[str, Sequence[Scope]]) -> None:
        """`scopes` by name, or by a pattern such as `*.workers.example`; a name itself goes before patterns."""
        self._scopes = {pattern: frozenset(given) for pattern, given in scopes.items()}

    def principal(self, names: Sequence[str]) -> Principal | None:
        """Of the first name that is known; None: it is nobody's."""
        for name in names:
            if name in self._scopes:
                return Principal(name, CERTIFICATE + name, self._scopes[name])
        for name in names:
            for pattern, scopes in self._scopes.items():
                if fnmatchcase(name, pattern):
                    return Principal(name, CERTIFICATE + name, scopes)
        return None
