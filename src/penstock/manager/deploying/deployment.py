"""Plans the writes that deploy, unload and remove models. Pure: no I/O."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from penstock.core.blocks import BlockRecord, BlockRole
from penstock.manager.block_table import BlockTable
from penstock.manager.desired_state import BLOCKS, FOLDERS, DesiredBlock, DesiredState, FolderRecord, encode
from penstock.storage.metadata.metadata_store import Compare, Write

# The fields of BlockRecord that a version inherits from the version that it replaces.
SPEC = ("replicas", "resources", "labels", "anti_affinity", "metadata", "weight")


class Choice(NamedTuple):
    """The versions of a model to deploy."""

    model: str
    source: str
    versions: Sequence[str]
    fallback_versions: Sequence[str] = ()  # older versions to load if `versions` fail to load
    spec: dict[str, Any] | None = None  # fields of BlockRecord to set; None: inherit all
    kept_versions: Collection[str] = ()  # versions that stay loaded as they are
    is_added_to_others: bool = False  # leave the model's other versions as they are
    compares: tuple[Compare, ...] = ()  # conditions of the write


class Deployment:
    """Plans writes to the metadata store from the current state; the caller commits the writes with conditions."""

    def __init__(self, state: DesiredState, table: BlockTable, new_id: Callable[[], str]) -> None:
        self._state = state
        self._blocks = table
        self._new_id = new_id

    def deploy(self, choice: Choice) -> list[Write]:
        """Return writes that load the chosen versions and withdraw the others.

        Withdrawn versions keep their revision, so that no worker reloads a block that is about to be unloaded.
        """
        writes = [self._plan_chosen(choice, version) for version in choice.versions]
        if choice.is_added_to_others:
            return writes
        for version in choice.fallback_versions:
            writes += self._plan_demotion(choice, version, BlockRole.SPARE)
        for block in self._state.list_model_blocks(choice.model):
            if block.record.version not in (*choice.versions, *choice.fallback_versions):
                writes += self._plan_demotion(choice, block.record.version, BlockRole.WITHDRAWN)
        return writes

    def deploy_folder(self, model: str, folder: FolderRecord, kept_versions: Collection[str] = ()) -> list[Write]:
        """Return writes that load the folder's versions; versions in `kept_versions` are not loaded again."""
        record = Write(FOLDERS + model, encode(folder), may_wait=True)
        return [
            record,
            *self.deploy(Choice(model, folder.source, folder.versions, folder.older, kept_versions=kept_versions)),
        ]

    def reload(self, model: str) -> list[Write]:
        """Return writes that load the chosen versions again, or the newest version if the model was unloaded."""
        blocks = self._state.list_model_blocks(model)
        chosen = [block for block in blocks if block.record.role is BlockRole.CHOSEN]
        if not chosen:
            chosen = sorted(blocks, key=lambda block: int(block.record.version))[-1:]
        return [_build_write(block.block_id, block.record, role=BlockRole.CHOSEN, generation=0) for block in chosen]

    def unload(self, model: str) -> list[Write]:
        return [
            _build_write(block.block_id, block.record, role=BlockRole.WITHDRAWN, generation=block.revision)
            for block in self._state.list_model_blocks(model)
            if block.record.role is BlockRole.CHOSEN
        ]

    def remove_folders(self, repository: str, present: Collection[str]) -> list[Write]:
        """Return writes that remove the models of this repository whose folders no longer exist."""
        writes = []
        for model, folder in self._state.folders.items():
            if model not in present and folder.source.rpartition("/")[0] == repository:
                writes.append(Write(FOLDERS + model, None, may_wait=True))
                writes += [
                    Write(BLOCKS + block.block_id, None, may_wait=True)
                    for block in self._state.list_model_blocks(model)
                    if block.record.source == folder.source
                ]
        return writes

    def change(self, block: DesiredBlock, **fields: Any) -> Write:
        """Return a write that changes fields of the record without loading the block again."""
        return _build_write(block.block_id, block.record, generation=block.revision, **fields)

    def _plan_chosen(self, choice: Choice, version: str) -> Write:
        known = self._state.find_block(choice.model, version)
        block_id = known.block_id if known is not None else self._new_id()
        template = self._find_template(choice.model, known)
        spec = {name: getattr(template, name) for name in SPEC} if template is not None else {}
        record = BlockRecord(model=choice.model, version=version, source=choice.source)
        is_kept = version in choice.kept_versions and known is not None and known.record.role is BlockRole.CHOSEN
        generation = known.revision if is_kept and known is not None else 0
        return _build_write(
            block_id, record, **spec | (choice.spec or {}), role=BlockRole.CHOSEN, generation=generation
        )

    def _find_template(self, model: str, current_block: DesiredBlock | None) -> BlockRecord | None:
        """Return the record whose SPEC fields a version inherits: its own if chosen, else the newest chosen one's."""
        chosen = [block for block in self._state.list_model_blocks(model) if block.record.role is BlockRole.CHOSEN]
        if current_block is not None and (current_block in chosen or not chosen):
            return current_block.record
        return max(chosen, key=lambda block: block.revision).record if chosen else None

    def _plan_demotion(self, choice: Choice, version: str, role: BlockRole) -> list[Write]:
        known = self._state.find_block(choice.model, version)
        if known is None:
            record = BlockRecord(model=choice.model, version=version, source=choice.source, role=role)
            return [_build_write(self._new_id(), record)]
        source = choice.source if role is BlockRole.SPARE else known.record.source
        deployed = self._blocks.get(known.block_id)
        # A version that failed to load gets a new revision, so that workers try again if it is needed later.
        is_kept = deployed is None or not deployed.is_wanted or deployed.is_in_service
        if is_kept and known.record.role is role and known.record.source == source:
            return []
        generation = known.revision if is_kept else 0
        return [_build_write(known.block_id, known.record, role=role, source=source, generation=generation)]


def _build_write(block_id: str, record: BlockRecord, **fields: Any) -> Write:
    changed = record.model_copy(update=fields)
    return Write(BLOCKS + block_id, encode(changed), may_wait=True)
