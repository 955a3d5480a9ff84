"""The guard: the one place that turns credentials into a principal and checks the principal's permission."""

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from penstock.core.errors import Forbidden, Unauthenticated, Unavailable
from penstock.core.principals import ANYBODY, KEY_PREFIX, NOBODY, Needs, Principal, Scope
from penstock.endpoints.credentials import Credentials

KeyRequirement = Literal["auto", "required", "off"]
M = TypeVar("M", bound=Callable[..., Any])
HOW_TO_SEND_A_KEY = "send 'authorization: Bearer KEY' or 'x-api-key: KEY'"


class KnownKeys(Protocol):
    """The API keys of a cluster."""

    @property
    def needs_key(self) -> bool:
        """Return whether a key was ever created in this cluster, so that calls need a key."""

    def find(self, text: str) -> Principal | None:
        """Return the holder of this key, expired or not."""


class TokenReader(Protocol):
    def read_token(self, token: str, now: float) -> Principal:
        """Return the principal of a session token, or raise Unauthenticated."""


CertificateReader = Callable[[tuple[str, ...]], Principal | None]


class Guard:
    """The guard of a process. `set_keys` updates its keys. Times are seconds since 1970."""

    def __init__(
        self,
        key_requirement: KeyRequirement = "auto",
        tokens: TokenReader | None = None,
        certificates: CertificateReader | None = None,
    ) -> None:
        """Create a guard. Until the keys are known, it refuses every method that needs a scope, unless keys are off."""
        self.is_open = key_requirement == "off"  # no key is required
        self._key_requirement = key_requirement
        self._keys: KnownKeys | None = None
        self._tokens = tokens
        self._certificates = certificates
        self.reads_certificates = certificates is not None  # if False, endpoints skip reading certificates

    def set_keys(self, keys: KnownKeys) -> None:
        self._keys = keys
        self.is_open = self._key_requirement == "off" or (self._key_requirement == "auto" and not keys.needs_key)

    def admit(self, credentials: Credentials, needs: Needs, now: float) -> Principal:
        """Return the caller, or raise Unauthenticated or Forbidden. Streams call this again for each message."""
        if self.is_open:
            return ANYBODY
        if not needs:
            return NOBODY
        principal = self._authenticate(credentials, now)
        if not principal.may(needs):
            raise _create_forbidden_error(principal, needs)
        return principal

    def _authenticate(self, credentials: Credentials, now: float) -> Principal:
        if credentials.fault:
            raise Unauthenticated(credentials.fault)
        if len(credentials.keys) > 1:
            raise Unauthenticated("the request has several different keys: send one")
        if credentials.keys:
            principal = self._find_principal(credentials.keys[0], now)
        elif credentials.certificate:
            found = self._certificates(credentials.certificate) if self._certificates is not None else None
            if found is None:
                raise Unauthenticated(
                    f"no principal is configured for certificate '{credentials.certificate[0]}' (tls.principals)"
                )
            principal = found
        else:
            raise Unauthenticated(f"this server requires a key: {HOW_TO_SEND_A_KEY}")
        if now >= principal.expires_at:
            raise Unauthenticated("this key has expired: use another key")
        return principal

    def _find_principal(self, key: str, now: float) -> Principal:
        if self._tokens is not None and not key.startswith(KEY_PREFIX):
            return self._tokens.read_token(key, now)
        if self._keys is None:
            raise Unavailable("this server has not received the keys yet; try again")
        principal = self._keys.find(key)
        if principal is None:
            raise Unauthenticated("unknown key: it is wrong, or it was revoked")
        return principal


def create_open_guard() -> Guard:
    """Return a guard that admits everybody."""
    return Guard("off")


def needs_scope(*scopes: Scope) -> Callable[[M], M]:
    """Declare that a caller of the method needs one of these scopes. Without scopes, the method is public."""

    def declare(method: M) -> M:
        vars(method)["needs"] = frozenset(scopes)
        return method

    return declare


def get_declared_needs(method: Callable[..., Any]) -> Needs:
    """Return the declared scopes of a method; raise TypeError if none are declared."""
    found: Needs | None = getattr(method, "needs", None)
    if found is None:
        raise TypeError(f"{method} declares no scopes: decorate it with needs_scope")
    return found


def _create_forbidden_error(principal: Principal, needs: Needs) -> Forbidden:
    wanted = " or ".join(f"'{scope}'" for scope in sorted(needs))
    return Forbidden(f"the key '{principal.name}' may not do this: it needs the scope {wanted}")
