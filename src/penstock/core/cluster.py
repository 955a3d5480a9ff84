"""What a gateway knows of its cluster's blocks, and what it may ask of the manager."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.blocks import BlockState


@dataclass(frozen=True, slots=True)
class BlockView:
    block_id: str
    model: str
    version: str
    state: BlockState
    reason: str


Listener = Callable[[Sequence[BlockView]], None]


class Control(Protocol):
    """The manager, in this process or in another."""

    async def load(self, model: str) -> None: ...

    async def unload(self, model: str) -> None: ...
