"""What those who guard doors are told of a cluster's keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AccessView:
    secret: bytes = b""  # under which digests of keys are made
    is_asking: bool = False  # a key was made once: doors ask
    keys: Mapping[str, bytes] = field(default_factory=dict)  # by id, access.keys.KeyRecord as JSON
    signers: Mapping[str, bytes] = field(default_factory=dict)  # by `kid`, public keys of session tokens
    revoked: frozenset[str] = frozenset()  # ids of keys, for those who are not told the keys


NO_KEYS = AccessView()
