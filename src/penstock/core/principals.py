"""Principals: callers identified by a key, a token or a certificate, with their permissions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from math import inf


class Scope(StrEnum):
    INFERENCE = "inference"
    UPLOAD = "upload"
    ADMIN = "admin"  # implies all others
    METRICS = "metrics"
    JOIN = "join"  # for the roles of a cluster: calls between workers, gateways and managers


KEY_PREFIX = "psk_"  # every key's text begins with it
Needs = frozenset[Scope]  # a caller needs at least one of these scopes
NO_SCOPES: Needs = frozenset()  # for everybody
ANY_SCOPE: Needs = frozenset(Scope)  # for everybody who has a key


def make_needs(*scopes: Scope) -> Needs:
    return frozenset(scopes)


INFERENCE_SCOPES = make_needs(Scope.INFERENCE)
VIEW_SCOPES = make_needs(Scope.INFERENCE, Scope.METRICS, Scope.UPLOAD)  # for lists of models and their state
METRICS_SCOPES = make_needs(Scope.METRICS)  # for the state of the whole server
ADMIN_SCOPES = make_needs(Scope.ADMIN)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of a key. 0 means: no limit."""

    requests_per_s: float = 0.0
    rows_per_s: float = 0.0
    tokens_per_s: float = 0.0
    burst_s: float = 1.0  # the allowed burst, in seconds of the rates
    concurrency: int = 0


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """The state of one of a caller's limits."""

    name: str  # requests, rows, tokens or concurrency
    quota: int  # allowed per window
    window_s: int  # 0: the quota is for concurrent requests
    remaining: int
    reset_s: float  # seconds until the whole quota is available again


@dataclass(frozen=True, slots=True)
class Principal:
    name: str  # for logs, metrics and people
    key_id: str = ""  # empty: not authenticated by a key
    scopes: frozenset[Scope] = frozenset()
    models: tuple[str, ...] = ()  # patterns of models that the principal may use; empty: all
    blocks: tuple[str, ...] = ()  # patterns of block ids that the principal may use; empty: all
    limits: KeyLimits | None = None
    expires_at: float = inf  # seconds since 1970
    is_restricted: bool = field(init=False)  # some models or blocks are not allowed

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_restricted", bool(self.models or self.blocks))

    def may(self, needs: Needs) -> bool:
        return not needs or Scope.ADMIN in self.scopes or not self.scopes.isdisjoint(needs)

    def may_use(self, model: str, block_id: str) -> bool:
        """Return whether both the model patterns and the block patterns allow the block."""
        return (not self.models or _matches_any(model, self.models)) and (
            not self.blocks or _matches_any(block_id, self.blocks)
        )

    def prefix_session_id(self, session_id: str) -> str:
        """Prefix the session id with the key id, so that keys cannot share sessions."""
        owner = self.key_id.replace("%", "%25").replace(":", "%3A")  # names in certificates may contain colons
        return f"{owner}:{session_id}" if owner else session_id


ANYBODY = Principal("anybody", scopes=ANY_SCOPE)  # if no keys are required
NOBODY = Principal("nobody")  # a caller without credentials, at a public method


@lru_cache(4096)
def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
