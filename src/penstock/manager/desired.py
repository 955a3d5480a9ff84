"""The desired state of a cluster: keys in the metadata store, what they hold, how changes fold. Decides; never acts.

| key | value, as JSON |
|---|---|
| `blocks/<block_id>` | core.blocks.BlockRecord |
| `routing/<model>` | core.settings.Routing, which stands before the model's own |
| `folders/<model>` | FolderRecord: what the model's folder had when it was last deployed |
| `workers/<worker_id>` | core.blocks.WorkerRecord |
| `members/gateways` | GatewayList |
| `members/workers` | PresentWorkers: those whom a successor may expect |
| `events/<number>` | manager/events.py |
| `leader`, `managers/<id>` | core/cluster/leaders.py |
| `history` | a random name, no JSON: what revisions and epochs are counted in |
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from penstock.core.blocks import BlockRecord, BlockRole, GatewayMember, StoredValue, WorkerRecord
from penstock.core.error_text import first_problem
from penstock.core.settings import Routing
from penstock.storage.metadata.base import Change, Snapshot

BLOCKS, ROUTING, FOLDERS, WORKERS = "blocks/", "routing/", "folders/", "workers/"
GATEWAYS, PRESENT, EVENTS, HISTORY = "members/gateways", "members/workers", "events/", "history"
K = TypeVar("K")
V = TypeVar("V")


class FolderRecord(StoredValue):
    source: str  # where it is
    versions: tuple[str, ...]
    older: tuple[str, ...] = ()


class GatewayRecord(StoredValue):
    gateway_id: str
    endpoint: str  # where workers and other gateways reach it
    address: str = ""  # where clients do, over gRPC


class GatewayList(StoredValue):
    gateways: tuple[GatewayRecord, ...] = ()

    def members(self) -> tuple[GatewayMember, ...]:
        return tuple(GatewayMember(each.gateway_id, each.endpoint, each.address) for each in self.gateways)


class PresentWorkers(StoredValue):
    worker_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DesiredBlock:
    block_id: str
    record: BlockRecord
    revision: int  # of its assignment: raised to load it anew


class Unread(NamedTuple):
    """A record that this version of Penstock does not understand: it is passed over."""

    key: str
    reason: str


@dataclass(slots=True)
class Folded:
    """What a snapshot or changes made another."""

    models: set[str] = field(default_factory=set)  # whose blocks are others
    routings: set[str] = field(default_factory=set)  # models
    workers: set[str] = field(default_factory=set)
    has_gateways: bool = False
    others: set[str] = field(default_factory=set)  # keys of which nothing is known here
    unread: list[Unread] = field(default_factory=list)


class DesiredState:
    def __init__(self) -> None:
        self.revision = 0  # of the store
        self.history = ""  # which its revisions are of: another where the store was wiped or set back
        self.blocks: dict[str, DesiredBlock] = {}
        self.routings: dict[str, str] = {}  # by model
        self.folders: dict[str, FolderRecord] = {}  # by model
        self.workers: dict[str, WorkerRecord] = {}
        self.gateways = GatewayList()
        self.membership = 0  # the revision of the list of gateways
        self.present: PresentWorkers | None = None  # None: nobody has written it down
        self.events: dict[int, bytes] = {}  # by number
        self.others: dict[str, bytes] = {}  # what other modules keep: by key
        self.revisions: dict[str, int] = {}  # of the last write of each record: by key
        self._models: dict[str, dict[str, DesiredBlock]] = {}

    def of_model(self, model: str) -> list[DesiredBlock]:
        return list(self._models.get(model, {}).values())

    def block(self, model: str, version: str) -> DesiredBlock | None:
        return next((each for each in self.of_model(model) if each.record.version == version), None)

    def is_unloaded(self, model: str) -> bool:
        """Somebody unloaded it, and nobody has loaded it since."""
        roles = {each.record.role for each in self.of_model(model)}
        return BlockRole.WITHDRAWN in roles and BlockRole.CHOSEN not in roles

    def restart(self, snapshot: Snapshot) -> Folded:
        """Everything is as the snapshot says."""
        present = {record.key for record in snapshot.records}
        gone = [Change(key, None, snapshot.revision) for key in self.revisions if key not in present]
        found = [Change(record.key, record.value, record.revision) for record in snapshot.records]
        folded = self.fold([*gone, *found])
        self.revision = snapshot.revision  # less than before where the store was set back
        return folded

    def fold(self, changes: Iterable[Change]) -> Folded:
        folded = Folded()
        for change in changes:
            self.revision = max(self.revision, change.revision)
            self.revisions.pop(change.key, None)
            if change.value is not None:
                self.revisions[change.key] = change.revision
            try:
                self._take(change, folded)
            except ValidationError as error:
                folded.unread.append(Unread(change.key, first_problem(error)))
        return folded

    def _take(self, change: Change, folded: Folded) -> None:
        key, value = change.key, change.value
        if key.startswith(BLOCKS):
            self._take_block(key.removeprefix(BLOCKS), change, folded)
        elif key.startswith(ROUTING):
            folded.routings.add(key.removeprefix(ROUTING))
            _put(self.routings, key.removeprefix(ROUTING), value, _read_routing)
        elif key.startswith(FOLDERS):
            _put(self.folders, key.removeprefix(FOLDERS), value, FolderRecord.model_validate_json)
        elif key.startswith(WORKERS):
            folded.workers.add(key.removeprefix(WORKERS))
            _put(self.workers, key.removeprefix(WORKERS), value, WorkerRecord.model_validate_json)
        elif key == GATEWAYS:
            self.gateways = GatewayList() if value is None else GatewayList.model_validate_json(value)
            self.membership, folded.has_gateways = change.revision, True
        elif key == PRESENT:
            self.present = None if value is None else PresentWorkers.model_validate_json(value)
        elif key == HISTORY:
            self.history = "" if value is None else value.decode()
        elif key.startswith(EVENTS):
            _put(self.events, int(key.removeprefix(EVENTS)), value, bytes)
        else:
            folded.others.add(key)
            _put(self.others, key, value, bytes)

    def _take_block(self, block_id: str, change: Change, folded: Folded) -> None:
        before = self.blocks.pop(block_id, None)
        if before is not None:
            folded.models.add(before.record.model)
            del self._models[before.record.model][block_id]
        if change.value is None:
            return
        record = BlockRecord.model_validate_json(change.value)
        block = DesiredBlock(block_id, record, record.generation or change.revision)
        self.blocks[block_id] = self._models.setdefault(record.model, {})[block_id] = block
        folded.models.add(record.model)


def encode(value: StoredValue) -> bytes:
    return value.model_dump_json(exclude_defaults=True).encode()


def _put(table: dict[K, V], key: K, value: bytes | None, read: Callable[[bytes], V]) -> None:
    table.pop(key, None)
    if value is not None:
        table[key] = read(value)


def _read_routing(value: bytes) -> str:
    return Routing.model_validate_json(value).model_dump_json()
