"""The desired state of a cluster: the keys in the metadata store, and their values in memory. Pure: no I/O.

| key | value, as JSON |
|---|---|
| `blocks/<block_id>` | core.blocks.BlockRecord |
| `routing/<model>` | core.settings.Routing; overrides the routing in model.yaml |
| `folders/<model>` | FolderRecord: the versions in the model's folder at its last deployment |
| `workers/<worker_id>` | core.blocks.WorkerRecord |
| `members/gateways` | GatewayList |
| `members/workers` | PresentWorkers: the workers that the next leader may expect |
| `events/<number>` | manager/event_log.py |
| `leader`, `managers/<id>` | core/cluster/manager_records.py |
| `history` | a random id, not JSON; a new id makes earlier revisions and epochs invalid |
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from penstock.core.blocks import BlockRecord, BlockRole, GatewayMember, StoredValue, WorkerRecord
from penstock.core.error_text import describe_first_problem
from penstock.core.settings import Routing
from penstock.storage.metadata.metadata_store import Change, Snapshot

BLOCKS, ROUTING, FOLDERS, WORKERS = "blocks/", "routing/", "folders/", "workers/"
GATEWAYS, PRESENT, EVENTS, HISTORY = "members/gateways", "members/workers", "events/", "history"
K = TypeVar("K")
V = TypeVar("V")


class FolderRecord(StoredValue):
    source: str  # path of the folder
    versions: tuple[str, ...]
    older: tuple[str, ...] = ()


class GatewayRecord(StoredValue):
    gateway_id: str
    endpoint: str  # address for workers and other gateways
    address: str = ""  # gRPC address for clients


class GatewayList(StoredValue):
    gateways: tuple[GatewayRecord, ...] = ()

    def list_members(self) -> tuple[GatewayMember, ...]:
        return tuple(GatewayMember(each.gateway_id, each.endpoint, each.address) for each in self.gateways)


class PresentWorkers(StoredValue):
    worker_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DesiredBlock:
    block_id: str
    record: BlockRecord
    revision: int  # of its assignment; a higher revision makes workers load the block again


class UnreadableRecord(NamedTuple):
    """A record of the metadata store that this version of Penstock cannot read, and skips."""

    key: str
    reason: str


@dataclass(slots=True)
class StateChanges:
    """The parts of the desired state that a snapshot or a list of writes changed."""

    models: set[str] = field(default_factory=set)  # models whose blocks changed
    routings: set[str] = field(default_factory=set)  # models whose routing changed
    workers: set[str] = field(default_factory=set)
    has_gateways: bool = False
    others: dict[str, bytes | None] = field(default_factory=dict)  # records of features by key; None: removed
    unreadable: list[UnreadableRecord] = field(default_factory=list)


class DesiredState:
    def __init__(self) -> None:
        self.revision = 0  # of the store
        self.history = ""  # the history of the revisions; changes if the store was wiped or restored
        self.blocks: dict[str, DesiredBlock] = {}
        self.routings: dict[str, str] = {}  # by model
        self.folders: dict[str, FolderRecord] = {}  # by model
        self.workers: dict[str, WorkerRecord] = {}
        self.gateways = GatewayList()
        self.membership = 0  # the revision of the list of gateways
        self.present: PresentWorkers | None = None  # None: never written
        self.events: dict[int, bytes] = {}  # by number
        self.others: dict[str, bytes] = {}  # records of features by key
        self.revisions: dict[str, int] = {}  # revision of each record's last write, by key
        self._models: dict[str, dict[str, DesiredBlock]] = {}

    def list_model_blocks(self, model: str) -> list[DesiredBlock]:
        return list(self._models.get(model, {}).values())

    def find_block(self, model: str, version: str) -> DesiredBlock | None:
        return next((each for each in self.list_model_blocks(model) if each.record.version == version), None)

    def is_unloaded(self, model: str) -> bool:
        """Return whether an operator unloaded the model and no operator has loaded the model again."""
        roles = {each.record.role for each in self.list_model_blocks(model)}
        return BlockRole.WITHDRAWN in roles and BlockRole.CHOSEN not in roles

    def replace_all(self, snapshot: Snapshot) -> StateChanges:
        """Replace the whole state by the snapshot."""
        present = {record.key for record in snapshot.records}
        gone = [Change(key, None, snapshot.revision) for key in self.revisions if key not in present]
        found = [Change(record.key, record.value, record.revision) for record in snapshot.records]
        state_changes = self.apply_changes([*gone, *found])
        self.revision = snapshot.revision  # lower than before if the store was restored from an older copy
        return state_changes

    def apply_changes(self, changes: Iterable[Change]) -> StateChanges:
        state_changes = StateChanges()
        for change in changes:
            self.revision = max(self.revision, change.revision)
            self.revisions.pop(change.key, None)
            if change.value is not None:
                self.revisions[change.key] = change.revision
            try:
                self._apply_change(change, state_changes)
            except ValidationError as error:
                state_changes.unreadable.append(UnreadableRecord(change.key, describe_first_problem(error)))
        return state_changes

    def _apply_change(self, change: Change, state_changes: StateChanges) -> None:
        key, value = change.key, change.value
        if key.startswith(BLOCKS):
            self._apply_block(key.removeprefix(BLOCKS), change, state_changes)
        elif key.startswith(ROUTING):
            state_changes.routings.add(key.removeprefix(ROUTING))
            _set_or_remove(self.routings, key.removeprefix(ROUTING), value, _read_routing)
        elif key.startswith(FOLDERS):
            _set_or_remove(self.folders, key.removeprefix(FOLDERS), value, FolderRecord.model_validate_json)
        elif key.startswith(WORKERS):
            state_changes.workers.add(key.removeprefix(WORKERS))
            _set_or_remove(self.workers, key.removeprefix(WORKERS), value, WorkerRecord.model_validate_json)
        elif key == GATEWAYS:
            self.gateways = GatewayList() if value is None else GatewayList.model_validate_json(value)
            self.membership, state_changes.has_gateways = change.revision, True
        elif key == PRESENT:
            self.present = None if value is None else PresentWorkers.model_validate_json(value)
        elif key == HISTORY:
            self.history = "" if value is None else value.decode()
        elif key.startswith(EVENTS):
            _set_or_remove(self.events, int(key.removeprefix(EVENTS)), value, bytes)
        else:
            state_changes.others[key] = value
            _set_or_remove(self.others, key, value, bytes)

    def _apply_block(self, block_id: str, change: Change, state_changes: StateChanges) -> None:
        before = self.blocks.pop(block_id, None)
        if before is not None:
            state_changes.models.add(before.record.model)
            del self._models[before.record.model][block_id]
        if change.value is None:
            return
        record = BlockRecord.model_validate_json(change.value)
        block = DesiredBlock(block_id, record, record.generation or change.revision)
        self.blocks[block_id] = self._models.setdefault(record.model, {})[block_id] = block
        state_changes.models.add(record.model)


def encode(value: StoredValue) -> bytes:
    return value.model_dump_json(exclude_defaults=True).encode()


def _set_or_remove(table: dict[K, V], key: K, value: bytes | None, read: Callable[[bytes], V]) -> None:
    table.pop(key, None)
    if value is not None:
        table[key] = read(value)


def _read_routing(value: bytes) -> str:
    return Routing.model_validate_json(value).model_dump_json()
