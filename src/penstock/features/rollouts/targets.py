"""Resolves an operator's reference to a block: VERSION, MODEL, MODEL:VERSION or a block id."""

from penstock.core.blocks import SERVABLE, BlockRole, BlockState
from penstock.manager.control_plane import ControlPlane
from penstock.manager.desired_state import DesiredBlock


class RolloutTargets:
    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    def parse(self, reference: str, name: str) -> tuple[str, str]:
        """Return the model and the version; an empty version means the newest one."""
        block = self._control.desired.blocks.get(reference)
        if block is not None:
            return block.record.model, block.record.version
        if reference.isdecimal():
            return name, reference
        model, _, version = reference.partition(":")
        return model, version

    def find_deployed(self, reference: str, name: str) -> DesiredBlock | None:
        """Return the deployed block that the reference names, or None."""
        model, version = self.parse(reference, name)
        if not version:
            return self.find_newest(model)
        block = self._control.desired.blocks.get(reference) or self._control.desired.find_block(model, version)
        return block if block is not None and block.record.role is BlockRole.CHOSEN else None

    def find_newest(self, model: str) -> DesiredBlock | None:
        """Return the newest serving block of the model, or the newest deployed block if none serves."""
        chosen = [
            each for each in self._control.desired.list_model_blocks(model) if each.record.role is BlockRole.CHOSEN
        ]
        serving = [each for each in chosen if self.find_state(each.block_id)[0] in SERVABLE]
        return max(serving or chosen, key=lambda each: int(each.record.version), default=None)

    def find_state(self, block_id: str) -> tuple[BlockState, str]:
        block = self._control.term.blocks.get(block_id)
        return (BlockState.UNLOADED, "the block is no longer deployed") if block is None else block.compute_state()
