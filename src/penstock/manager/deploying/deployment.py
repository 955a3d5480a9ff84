"""What is written when models are deployed, unloaded and removed. Decides; never acts."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from penstock.core.blocks import BlockRecord, BlockRole
from penstock.manager.desired import BLOCKS, FOLDERS, DesiredBlock, DesiredState, FolderRecord, encode
from penstock.manager.registry import Registry
from penstock.storage.metadata.base import Compare, Write

# What a version inherits from the one that it replaces.
SPEC = ("replicas", "resources", "labels", "anti_affinity", "metadata", "weight")


class Choice(NamedTuple):
    """These versions of a model are wanted."""

    model: str
    source: str
    versions: Sequence[str]
    spares: Sequence[str] = ()  # that are tried where these do not load
    spec: dict[str, Any] | None = None  # of BlockRecord, what is asked for; None: as it was
    is_beside: bool = False  # the model's others stay as they are
    compares: tuple[Compare, ...] = ()  # what must still be so when it is written


class Deployment:
    """Plans with what is known now; whoever writes it has the store compare."""

    def __init__(self, state: DesiredState, registry: Registry, new_id: Callable[[], str]) -> None:
        self._state = state
        self._registry = registry
        self._new_id = new_id

    def deploy(self, choice: Choice) -> list[Write]:
        """What is chosen is loaded anew. What serves keeps its revision, so that nobody reloads what is to go."""
        writes = [self._choose(choice, version) for version in choice.versions]
        if choice.is_beside:
            return writes
        for version in choice.spares:
            writes += self._demote(choice, version, BlockRole.SPARE)
        for block in self._state.of_model(choice.model):
            if block.record.version not in (*choice.versions, *choice.spares):
                writes += self._demote(choice, block.record.version, BlockRole.WITHDRAWN)
        return writes

    def deploy_folder(self, model: str, folder: FolderRecord) -> list[Write]:
        record = Write(FOLDERS + model, encode(folder), may_wait=True)
        return [record, *self.deploy(Choice(model, folder.source, folder.versions, folder.older))]

    def reload(self, model: str) -> list[Write]:
        """What is chosen, or the newest of what was unloaded, is loaded anew from where it came."""
        blocks = self._state.of_model(model)
        chosen = [block for block in blocks if block.record.role is BlockRole.CHOSEN]
        if not chosen:
            chosen = sorted(blocks, key=lambda block: int(block.record.version))[-1:]
        return [_write(block.block_id, block.record, role=BlockRole.CHOSEN, generation=0) for block in chosen]

    def unload(self, model: str) -> list[Write]:
        return [
            _write(block.block_id, block.record, role=BlockRole.WITHDRAWN, generation=block.revision)
            for block in self._state.of_model(model)
            if block.record.role is BlockRole.CHOSEN
        ]

    def remove_folders(self, repository: str, present: Collection[str]) -> list[Write]:
        """Models of this repository that are there no more."""
        writes = []
        for model, folder in self._state.folders.items():
            if model not in present and folder.source.rpartition("/")[0] == repository:
                writes.append(Write(FOLDERS + model, None, may_wait=True))
                writes += [
                    Write(BLOCKS + block.block_id, None, may_wait=True)
                    for block in self._state.of_model(model)
                    if block.record.source == folder.source
                ]
        return writes

    def change(self, block: DesiredBlock, **fields: Any) -> Write:
        """Without loading it anew."""
        return _write(block.block_id, block.record, generation=block.revision, **fields)

    def _choose(self, choice: Choice, version: str) -> Write:
        known = self._state.block(choice.model, version)
        block_id = known.block_id if known is not None else self._new_id()
        pattern = self._pattern(choice.model, known)
        spec = {name: getattr(pattern, name) for name in SPEC} if pattern is not None else {}
        record = BlockRecord(model=choice.model, version=version, source=choice.source)
        return _write(block_id, record, **spec | (choice.spec or {}), role=BlockRole.CHOSEN)

    def _pattern(self, model: str, known: DesiredBlock | None) -> BlockRecord | None:
        """The record whose wishes a version inherits: its own while it is chosen, else of what is chosen now."""
        chosen = [block for block in self._state.of_model(model) if block.record.role is BlockRole.CHOSEN]
        if known is not None and (known in chosen or not chosen):
            return known.record
        return max(chosen, key=lambda block: block.revision).record if chosen else None

    def _demote(self, choice: Choice, version: str, role: BlockRole) -> list[Write]:
        known = self._state.block(choice.model, version)
        if known is None:
            record = BlockRecord(model=choice.model, version=version, source=choice.source, role=role)
            return [_write(self._new_id(), record)]
        source = choice.source if role is BlockRole.SPARE else known.record.source
        deployed = self._registry.get(known.block_id)
        # What was tried and did not load is tried anew, should it come to that again.
        is_kept = deployed is None or not deployed.is_wanted or deployed.is_taken_up
        if is_kept and known.record.role is role and known.record.source == source:
            return []
        generation = known.revision if is_kept else 0
        return [_write(known.block_id, known.record, role=role, source=source, generation=generation)]


def _write(block_id: str, record: BlockRecord, **fields: Any) -> Write:
    changed = record.model_copy(update=fields)
    return Write(BLOCKS + block_id, encode(changed), may_wait=True)
