"""Session tokens: a manager signs them, direct endpoints verify them offline. No I/O.

A token is a JSON Web Token, signed with Ed25519 only. It names the block that it gives access to (`aud`), its expiry
(`exp`), and the id of the API key it was issued for (`sub`), with that key's name and limits. Endpoints hold the public
keys by `kid` and know until when each API key is valid. A token is refused once its API key is no longer valid.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import inf
from typing import Any, NamedTuple

from penstock.core.errors import Unauthenticated
from penstock.core.principals import KeyLimits, Principal, Scope

ALGORITHM = "EdDSA"
LIFETIME_S = 15 * 60.0
MAX_CHARS = 4096
MAX_CACHED_TOKENS = 4096
SCOPES = frozenset((Scope.INFERENCE,))  # a token permits inference only, whatever its API key permits
RENEWAL_ADVICE = "get a new one with Discover"


def _return_no_expiry(key_id: str) -> float:
    return inf


class SignedToken(NamedTuple):
    text: str
    expires_at: float  # seconds since 1970


class SigningKey(NamedTuple):
    kid: str
    private: bytes  # 32 bytes


def derive_public_key(private: bytes) -> bytes:
    """Return the public key of a signing key. Endpoints verify tokens with the public key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign_token(key: SigningKey, principal: Principal, block_id: str, now: float) -> SignedToken:
    """Return a token that expires after LIFE_S, or when its API key expires if that is earlier."""
    import jwt  # deferred: the import takes a tenth of a second
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    expires_at = min(now + LIFETIME_S, principal.expires_at)
    claims: dict[str, Any] = {
        "aud": block_id,
        "sub": principal.key_id,
        "name": principal.name,
        "scopes": sorted(SCOPES),
        "iat": now,
        "exp": expires_at,
    }
    if principal.limits is not None:
        claims["limits"] = asdict(principal.limits)
    private = Ed25519PrivateKey.from_private_bytes(key.private)
    return SignedToken(jwt.encode(claims, private, ALGORITHM, {"kid": key.kid}), expires_at)


class SessionTokens:
    """A TokenReader that caches the latest verified tokens, up to `max_cached`."""

    def __init__(self, max_cached: int = MAX_CACHED_TOKENS) -> None:
        self._public: dict[str, Any] = {}
        self._signers: Mapping[str, bytes] = {}
        self._valid_until: Callable[[str], float] = _return_no_expiry
        self._clock_ahead_s = 0.0
        self._verified: OrderedDict[str, Principal] = OrderedDict()
        self._max_cached = max_cached

    def set_keys(
        self,
        signers: Mapping[str, bytes],
        valid_until: Callable[[str], float] = _return_no_expiry,
        clock_ahead_s: float = 0.0,
    ) -> None:
        """Replace the public keys by `kid`, and the function that returns until when an API key is valid.

        `valid_until` takes the id of a key, and returns seconds since 1970; -inf: the key was revoked or deleted.
        `clock_ahead_s`: how far the clock of the tokens' issuer is ahead of this process's clock.
        """
        if not self._signers.items() <= signers.items() or clock_ahead_s != self._clock_ahead_s:
            self._verified.clear()
            self._public.clear()
        self._clock_ahead_s = clock_ahead_s
        self._signers = dict(signers)
        self._valid_until = valid_until

    def read_token(self, token: str, now: float) -> Principal:
        """Return the principal of a session token, or raise Unauthenticated."""
        principal = self._verified.get(token)
        if principal is None:
            principal = self._verify(token)
            if now < principal.expires_at:
                self._cache_principal(token, principal)
        if now >= principal.expires_at:
            self._verified.pop(token, None)
            raise Unauthenticated(f"this session token has expired: {RENEWAL_ADVICE}")
        if now >= (key_ends := self._valid_until(principal.key_id)):
            what = "was revoked" if key_ends == -inf else "has expired"
            raise Unauthenticated(f"the API key of this session token {what}: use another key")
        return principal

    def _cache_principal(self, token: str, principal: Principal) -> None:
        self._verified[token] = principal
        if len(self._verified) > self._max_cached:
            self._verified.popitem(last=False)

    def _verify(self, token: str) -> Principal:
        if len(token) > MAX_CHARS or token.count(".") != 2:
            raise Unauthenticated("the credentials are neither an API key nor a session token")
        import jwt

        try:
            kid = jwt.get_unverified_header(token).get("kid", "")
            if kid not in self._signers:
                raise Unauthenticated(f"this session token is signed with an unknown key: {RENEWAL_ADVICE}")
            claims: Mapping[str, Any] = jwt.decode(token, self._find_public_key(kid), [ALGORITHM], _JWT_OPTIONS)
            return _make_principal(claims, self._clock_ahead_s)
        except jwt.InvalidTokenError as error:
            raise Unauthenticated(f"this session token is invalid: {RENEWAL_ADVICE}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise Unauthenticated(f"this session token lacks required claims: {RENEWAL_ADVICE}") from error

    def _find_public_key(self, kid: str) -> Any:
        if kid not in self._public:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

            self._public[kid] = Ed25519PublicKey.from_public_bytes(self._signers[kid])
        return self._public[kid]


# The caller passes its own clock and checks the block, so PyJWT must not check these.
_JWT_OPTIONS: Any = {"verify_exp": False, "verify_iat": False, "verify_aud": False, "require": ["aud", "exp", "sub"]}


def _make_principal(claims: Mapping[str, Any], clock_ahead_s: float) -> Principal:
    block_id, limits, expires_at = claims["aud"], claims.get("limits"), float(claims["exp"]) - clock_ahead_s
    if not isinstance(block_id, str) or not block_id or not expires_at < inf:
        raise ValueError("a token must name one block and an expiry")
    return Principal(
        str(claims["name"]),
        str(claims["sub"]),
        frozenset(Scope(each) for each in claims["scopes"]) & SCOPES,
        blocks=(block_id,),
        limits=None if limits is None else KeyLimits(**limits),
        expires_at=expires_at,
    )
