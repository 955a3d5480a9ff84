"""Who asks, and what they may do: the principal that a guard makes of a key, a token or a certificate. Decides only."""

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
    JOIN = "join"  # for the roles of a cluster: what workers, gateways and managers say to each other


KEY_PREFIX = "psk_"  # of the text of every key
Needs = frozenset[Scope]  # any of these is enough
PUBLIC: Needs = frozenset()  # asks nothing of anybody
ANY_SCOPE: Needs = frozenset(Scope)  # whoever has a key


def needs(*scopes: Scope) -> Needs:
    return frozenset(scopes)


INFERRING = needs(Scope.INFERENCE)
SEEING = needs(Scope.INFERENCE, Scope.METRICS, Scope.UPLOAD)  # what models there are, and how they do
MEASURING = needs(Scope.METRICS)  # how the whole server does
CHANGING = needs(Scope.ADMIN)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may ask for, 0 being no limit."""

    requests_per_s: float = 0.0
    rows_per_s: float = 0.0
    tokens_per_s: float = 0.0
    burst_s: float = 1.0  # what may come at once, in seconds of the rates
    concurrency: int = 0


@dataclass(frozen=True, slots=True)
class LimitStanding:
    """How a caller stands with one of its limits."""

    name: str  # of what: requests, rows, tokens, concurrency
    quota: int  # in so many seconds
    window_s: int  # 0: at once
    remaining: int
    reset_s: float  # until all of it is there again


@dataclass(frozen=True, slots=True)
class Principal:
    name: str  # for logs, metrics and people
    key_id: str = ""  # empty: no key stands behind it
    scopes: frozenset[Scope] = frozenset()
    models: tuple[str, ...] = ()  # patterns of the models that it may ask; empty: all
    blocks: tuple[str, ...] = ()  # patterns of the blocks' ids; empty: all
    limits: KeyLimits | None = None
    expires_at: float = inf  # seconds since 1970
    is_bound: bool = field(init=False)  # there is something that it may not ask

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_bound", bool(self.models or self.blocks))

    def may(self, needs: Needs) -> bool:
        return not needs or Scope.ADMIN in self.scopes or not self.scopes.isdisjoint(needs)

    def may_ask(self, model: str, block_id: str) -> bool:
        """Each list that it has must name it."""
        return (not self.models or _is_among(model, self.models)) and (
            not self.blocks or _is_among(block_id, self.blocks)
        )

    def session_id(self, given: str) -> str:
        """A session that it names is its own: the same name of another's is another session."""
        owner = self.key_id.replace("%", "%25").replace(":", "%3A")  # names in certificates may have colons
        return f"{owner}:{given}" if owner else given


ANYBODY = Principal("anybody", scopes=ANY_SCOPE)  # where doors ask nothing
NOBODY = Principal("nobody")  # who showed nothing, at a method that is for all


@lru_cache(4096)
def _is_among(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
