"""Routes: the blocks that serve a model name, their shares of the requests, and the block that gets copies."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Sticky = Literal["none", "key", "session"]


class BlockShare(NamedTuple):
    block_id: str
    weight: float  # relative to the route's other shares; 0: the block keeps its sessions and gets no new sessions


@dataclass(frozen=True, slots=True)
class NameRoute:
    """The route of a model name. Without a route the newest ready version serves the name."""

    name: str
    shares: tuple[BlockShare, ...]
    sticky: Sticky = "none"  # whether requests of the same caller use the same block; those of a session always do
    key: str = ""  # the request parameter that identifies callers for `sticky: key`
    shadow: str = ""  # a block that gets copies of requests; its answers are dropped
    shadow_share: float = 0.0  # the share of requests that are copied, from 0 to 1
    is_compared: bool = False  # compare the shadow's outputs with those of the original answers
    trial: str = ""  # a block among the shares that is still on trial
    allowance: int = 0  # the total number of requests that each gateway may send to the block on trial
    began: str = ""  # identifies the period for which the allowance is valid

    @property
    def compared_block(self) -> str:
        """Return the id of the block that is compared with the route's first block, or an empty text."""
        if self.shadow or len(self.shares) < 2:
            return self.shadow
        return self.shares[-1].block_id

    @property
    def is_split(self) -> bool:
        """True if several blocks share the requests, so that a block must be chosen for each request."""
        return len(self.shares) != 1 or bool(self.shadow or self.trial)

    def block_ids(self) -> set[str]:
        return {share.block_id for share in self.shares} | ({self.shadow} - {""})
