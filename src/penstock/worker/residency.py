"""Which blocks a worker must load or let go of, given what it is assigned and what it holds. Decides; never acts."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.core.blocks import BlockState


@dataclass(frozen=True, slots=True)
class Assigned:
    block_id: str
    model: str
    version: str
    folder: str
    revision: int


@dataclass(frozen=True, slots=True)
class Load:
    block: Assigned


@dataclass(frozen=True, slots=True)
class Unload:
    block_id: str


@dataclass(slots=True)
class Held:
    block: Assigned  # the newest assignment; what serves may be an older revision while it loads
    state: BlockState
    reason: str = ""


@dataclass(slots=True)
class Residency:
    held: dict[str, Held] = field(default_factory=dict)
    _loading: dict[str, int] = field(default_factory=dict)  # block to the revision on its way
    _serving: set[str] = field(default_factory=set)

    def assign(self, blocks: Iterable[Assigned]) -> list[Load | Unload]:
        wanted = {block.block_id: block for block in blocks}
        actions: list[Load | Unload] = []
        for block_id in [held for held in self.held if held not in wanted]:
            del self.held[block_id]
            self._loading.pop(block_id, None)
            if block_id in self._serving:
                self._serving.discard(block_id)
                actions.append(Unload(block_id))
        for block_id, block in wanted.items():
            held = self.held.get(block_id)
            if held is None or held.block.revision < block.revision:
                self.held[block_id] = Held(block, BlockState.LOADING)
                if block_id not in self._loading:
                    self._loading[block_id] = block.revision
                    actions.append(Load(block))
        return actions

    def loaded(self, block: Assigned) -> tuple[bool, list[Load | Unload]]:
        """Whether what was loaded is still wanted, and what to do next."""
        self._loading.pop(block.block_id, None)
        held = self.held.get(block.block_id)
        if held is None:
            return False, []
        if held.block.revision > block.revision:
            return False, self._load_again(held.block)
        held.state, held.reason = BlockState.READY, ""
        self._serving.add(block.block_id)
        return True, []

    def failed(self, block: Assigned, reason: str) -> list[Load | Unload]:
        """An earlier revision of the block goes on serving."""
        self._loading.pop(block.block_id, None)
        held = self.held.get(block.block_id)
        if held is None:
            return []
        if held.block.revision > block.revision:
            return self._load_again(held.block)
        held.state, held.reason = BlockState.FAILED, reason
        return []

    def _load_again(self, block: Assigned) -> list[Load | Unload]:
        self._loading[block.block_id] = block.revision
        return [Load(block)]
