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
    routing: str = ""  # JSON of core.settings.Routing that stands before the model's own; empty: none


Listener = Callable[[Sequence[BlockView]], None]


class Control(Protocol):
    """The manager, in this process or in another."""

    async def load(self, model: str) -> None: ...

    async def unload(self, model: str) -> None: ...

    async def set_routing(self, model: str, routing_json: str) -> None:
        """Routes the model's requests so, on every gateway and over restarts; empty: as its model.yaml says."""
        ...
