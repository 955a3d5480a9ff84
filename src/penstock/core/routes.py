"""A route: which blocks answer for a name, in which shares, and who gets copies of its requests."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Sticky = Literal["none", "key", "session"]


class Share(NamedTuple):
    block_id: str
    weight: float  # among those of the route; 0: it keeps the sessions that it has, and gets nobody new


@dataclass(frozen=True, slots=True)
class NameRoute:
    """Where there is none, the newest version that is ready answers for its model's name."""

    name: str
    shares: tuple[Share, ...]
    sticky: Sticky = "none"  # who comes again is answered by the same block; sessions are in any case
    key: str = ""  # the request parameter that `sticky: key` goes by
    shadow: str = ""  # a block that gets copies of requests, whose answers nobody waits for
    shadow_share: float = 0.0  # of the requests, from 0 to 1
    is_compared: bool = False  # whether the shadow's outputs are held against those that were given
    trial: str = ""  # a block of the shares that has not proved itself yet
    allowance: int = 0  # what each gateway may give the block on trial, of all requests since the route began
    began: str = ""  # names what the allowance is counted for

    @property
    def judged(self) -> str:
        """The block that is held against the first; empty: there is none."""
        if self.shadow or len(self.shares) < 2:
            return self.shadow
        return self.shares[-1].block_id

    @property
    def is_split(self) -> bool:
        """Each request is decided about: none may go past those who decide."""
        return len(self.shares) != 1 or bool(self.shadow or self.trial)

    def block_ids(self) -> set[str]:
        """The shadow, too."""
        return {share.block_id for share in self.shares} | ({self.shadow} - {""})
