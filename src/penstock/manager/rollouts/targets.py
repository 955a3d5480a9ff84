"""What an operator's words for a block mean: which model and version, and which block where it is deployed."""

from penstock.core.blocks import SERVABLE, BlockRole, BlockState
from penstock.manager.desired import DesiredBlock
from penstock.manager.manager import Manager


class RolloutTargets:
    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def meant(self, asked: str, name: str) -> tuple[str, str]:
        """The model and the version; no version: its newest."""
        block = self._manager.desired.blocks.get(asked)
        if block is not None:
            return block.record.model, block.record.version
        if asked.isdecimal():
            return name, asked
        model, _, version = asked.partition(":")
        return model, version

    def deployed(self, asked: str, name: str) -> DesiredBlock | None:
        """What is meant, where it is deployed."""
        model, version = self.meant(asked, name)
        if not version:
            return self.newest(model)
        block = self._manager.desired.blocks.get(asked) or self._manager.desired.block(model, version)
        return block if block is not None and block.record.role is BlockRole.CHOSEN else None

    def newest(self, model: str) -> DesiredBlock | None:
        """The newest block of a model that serves, or else that is to."""
        chosen = [each for each in self._manager.desired.of_model(model) if each.record.role is BlockRole.CHOSEN]
        serving = [each for each in chosen if self.state(each.block_id)[0] in SERVABLE]
        return max(serving or chosen, key=lambda each: int(each.record.version), default=None)

    def state(self, block_id: str) -> tuple[BlockState, str]:
        block = self._manager.reign.registry.get(block_id)
        return (BlockState.UNLOADED, "it is not deployed any more") if block is None else block.state()
