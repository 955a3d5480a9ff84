"""The API keys of a cluster, in the form that the manager sends to gateways and workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True, slots=True)
class AccessView:
    secret: bytes = b""  # for digests of keys
    needs_key: bool = False  # keys are required, because one was created
    keys: Mapping[str, bytes] = field(default_factory=dict)  # by id, access.keys.KeyRecord as JSON
    signers: Mapping[str, bytes] = field(default_factory=dict)  # public keys of session tokens, by `kid`
    clock_ahead_s: float = 0.0  # of the clock of the manager, which issues session tokens, against this machine's
    # For workers, which do not get the keys:
    revoked: frozenset[str] = frozenset()  # ids of revoked and deleted keys
    expires_at: Mapping[str, float] = field(default_factory=dict)  # of keys that expire, by id; seconds since 1970

    def find_expiry(self, key_id: str) -> float:
        """Return when session tokens of this key become invalid; -inf if the key was revoked or deleted."""
        return -inf if key_id in self.revoked else self.expires_at.get(key_id, inf)


NO_KEYS = AccessView()
CLOCK_TOLERANCE_S = 2.0  # networks and busy processes cause smaller differences


def compute_clock_ahead_s(manager_s: float, own_s: float) -> float:
    """Return by how much the manager's clock is ahead; 0 if the clocks agree or `manager_s` is 0 (unknown)."""
    ahead_s = manager_s - own_s if manager_s else 0.0
    return ahead_s if abs(ahead_s) > CLOCK_TOLERANCE_S else 0.0
