"""The guard: the one place that makes a principal of what was shown at a door, and holds it against what is needed."""

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from penstock.access.keys import KeyTable
from penstock.access.showing import Shown
from penstock.core.errors import Forbidden, Unauthenticated, Unavailable
from penstock.core.principals import ANYBODY, KEY_PREFIX, NOBODY, Needs, Principal, Scope

Asking = Literal["auto", "required", "off"]
M = TypeVar("M", bound=Callable[..., Any])
HOW = "send 'authorization: Bearer KEY' or 'x-api-key: KEY'"


class TokenReader(Protocol):
    def principal(self, token: str, now: float) -> Principal:
        """Raises Unauthenticated."""


CertificateReader = Callable[[tuple[str, ...]], Principal | None]


class Guard:
    """One a process, changed in place. Times are seconds since 1970."""

    def __init__(
        self,
        asking: Asking = "auto",
        tokens: TokenReader | None = None,
        certificates: CertificateReader | None = None,
    ) -> None:
        """Until the keys are known, nobody is admitted to what needs anything, unless no door asks."""
        self.is_open = asking == "off"  # nobody is asked anything
        self._asking = asking
        self._table: KeyTable | None = None
        self._tokens = tokens
        self._certificates = certificates
        self.reads_certificates = certificates is not None  # else doors need not look for them

    def keys_changed(self, table: KeyTable) -> None:
        self._table = table
        self.is_open = self._asking == "off" or (self._asking == "auto" and not table.is_asking)

    def admit(self, shown: Shown, needs: Needs, now: float) -> Principal:
        """Raises Unauthenticated or Forbidden. What goes on for long (a stream) asks again with each message."""
        if self.is_open:
            return ANYBODY
        if not needs:
            return NOBODY
        principal = self._known(shown, now)
        if not principal.may(needs):
            raise _forbidden(principal, needs)
        return principal

    def _known(self, shown: Shown, now: float) -> Principal:
        if shown.fault:
            raise Unauthenticated(shown.fault)
        if len(shown.keys) > 1:
            raise Unauthenticated("different keys were sent at once: send one")
        if shown.keys:
            principal = self._holder(shown.keys[0], now)
        elif shown.certificate:
            found = self._certificates(shown.certificate) if self._certificates is not None else None
            if found is None:
                raise Unauthenticated(f"the certificate of '{shown.certificate[0]}' is nobody's here")
            principal = found
        else:
            raise Unauthenticated(f"this server asks for a key: {HOW}")
        if now >= principal.expires_at:
            raise Unauthenticated("this key has expired")
        return principal

    def _holder(self, key: str, now: float) -> Principal:
        if self._tokens is not None and not key.startswith(KEY_PREFIX):
            return self._tokens.principal(key, now)
        if self._table is None:
            raise Unavailable("this server does not know yet who has a key; try again")
        principal = self._table.find(key)
        if principal is None:
            raise Unauthenticated("this key is not known here: it is wrong, or it was revoked")
        return principal


def open_guard() -> Guard:
    """Where nobody is asked anything."""
    return Guard("off")


def needs_scope(*scopes: Scope) -> Callable[[M], M]:
    """Declares beside the method of a service what it needs, any of these being enough; none: it is public."""

    def declare(method: M) -> M:
        vars(method)["needs"] = frozenset(scopes)
        return method

    return declare


def declared_needs(method: Callable[..., Any]) -> Needs:
    """Of a method of a service: none may be without."""
    found: Needs | None = getattr(method, "needs", None)
    if found is None:
        raise TypeError(f"{method} does not declare what it needs: decorate it with needs_scope")
    return found


def _forbidden(principal: Principal, needs: Needs) -> Forbidden:
    wanted = " or ".join(f"'{scope}'" for scope in sorted(needs))
    return Forbidden(f"the key '{principal.name}' may not do this: it needs the scope {wanted}")
