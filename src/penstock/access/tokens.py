"""Session tokens: a manager signs them, the doors that they open verify them offline. Decides only.

A token is a JSON Web Token, signed with Ed25519 and nothing else: the block that it opens (`aud`), until when (`exp`),
and whose key stands behind it (`sub`), with that key's name and limits. Doors know public keys by `kid`, and the ids of
keys that were revoked: a token of one of these opens nothing any more, however long it would have been good.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import asdict
from math import inf
from typing import Any, NamedTuple

from penstock.core.errors import Unauthenticated
from penstock.core.principals import KeyLimits, Principal, Scope

ALGORITHM = "EdDSA"
LIFE_S = 15 * 60.0
MAX_CHARS = 4096
MAX_REMEMBERED = 4096
SCOPES = frozenset((Scope.INFERENCE,))  # whatever else its key may do, a token is for inference alone
AGAIN = "ask Discover for another"


class SignedToken(NamedTuple):
    text: str
    expires_at: float  # seconds since 1970


class SigningKey(NamedTuple):
    kid: str
    private: bytes  # 32 bytes


def public_part(private: bytes) -> bytes:
    """What doors hold of a signing key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(key: SigningKey, principal: Principal, block_id: str, now: float) -> SignedToken:
    """It lives no longer than the key that stands behind it."""
    import jwt  # takes a tenth of a second: not before somebody asks
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    expires_at = min(now + LIFE_S, principal.expires_at)
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


class Tokens:
    """A TokenReader. Those that were verified are remembered, as many as may be."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._public: dict[str, Any] = {}
        self._signers: Mapping[str, bytes] = {}
        self._revoked: Collection[str] = frozenset()
        self._known: OrderedDict[str, Principal] = OrderedDict()
        self._max_remembered = max_remembered

    def changed(self, signers: Mapping[str, bytes], revoked: Collection[str]) -> None:
        """Public keys by `kid`, and the ids of the API keys whose tokens are good for nothing."""
        if signers != self._signers:
            if not self._signers.items() <= signers.items():
                self._known.clear()
                self._public.clear()
            self._signers = dict(signers)
        self._revoked = frozenset(revoked)

    def principal(self, token: str, now: float) -> Principal:
        """Raises Unauthenticated."""
        principal = self._known.get(token)
        if principal is None:
            principal = self._verified(token)
            if now < principal.expires_at:
                self._remember(token, principal)
        if now >= principal.expires_at:
            self._known.pop(token, None)
            raise Unauthenticated(f"this session token has expired: {AGAIN}")
        if principal.key_id in self._revoked:
            raise Unauthenticated("the key behind this session token was revoked")
        return principal

    def _remember(self, token: str, principal: Principal) -> None:
        self._known[token] = principal
        if len(self._known) > self._max_remembered:
            self._known.popitem(last=False)

    def _verified(self, token: str) -> Principal:
        if len(token) > MAX_CHARS or token.count(".") != 2:
            raise Unauthenticated("what was shown is neither a key nor a session token")
        import jwt

        try:
            kid = jwt.get_unverified_header(token).get("kid", "")
            if kid not in self._signers:
                raise Unauthenticated(f"this session token is signed with a key that is not known here: {AGAIN}")
            claims: Mapping[str, Any] = jwt.decode(token, self._key(kid), [ALGORITHM], _UNLOOKED)
            return _principal(claims)
        except jwt.InvalidTokenError as error:
            raise Unauthenticated(f"this session token is not good: {AGAIN}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise Unauthenticated(f"this session token does not say what one must: {AGAIN}") from error

    def _key(self, kid: str) -> Any:
        if kid not in self._public:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

            self._public[kid] = Ed25519PublicKey.from_public_bytes(self._signers[kid])
        return self._public[kid]


# Times are held against the clock that we are given, and the block is held against the request.
_UNLOOKED: Any = {"verify_exp": False, "verify_iat": False, "verify_aud": False, "require": ["aud", "exp", "sub"]}


def _principal(claims: Mapping[str, Any]) -> Principal:
    block_id, limits, expires_at = claims["aud"], claims.get("limits"), float(claims["exp"])
    if not isinstance(block_id, str) or not block_id or not expires_at < inf:
        raise ValueError("a token opens one block, until it expires")
    return Principal(
        str(claims["name"]),
        str(claims["sub"]),
        frozenset(Scope(each) for each in claims["scopes"]) & SCOPES,
        blocks=(block_id,),
        limits=None if limits is None else KeyLimits(**limits),
        expires_at=expires_at,
    )
