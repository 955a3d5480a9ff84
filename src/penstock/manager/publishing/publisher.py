"""Publishes updates for workers and gateways: a map per worker, and one map for all gateways. Pure: no I/O."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.blocks import BlockDetails, BlockView, GatewayMember
from penstock.core.cluster.access_view import AccessView
from penstock.core.cluster.routes import NameRoute
from penstock.manager.block_table import BlockTable
from penstock.manager.deployed_block import DeployedBlock
from penstock.manager.desired_state import DesiredState
from penstock.manager.publishing.versioned_map import VersionedMap

GATEWAYS, ACCESS, WORKERS_KEYS, ENDPOINT = "gateways", "access", "workers-keys", "direct-endpoint"
BLOCK, ROUTE, KEY, RECORD = "block/", "route/", "key/", "record/"
NO_DETAILS = BlockDetails()


class AssignedBlock(NamedTuple):
    block_id: str
    model: str
    version: str
    folder: str
    revision: int
    replaces: tuple[str, ...]
    is_new: bool


@dataclass(frozen=True, slots=True)
class GatewayItem:
    """The list of the cluster's gateways, published to gateways."""

    revision: int
    gateways: tuple[GatewayMember, ...]


@dataclass(frozen=True, slots=True)
class GatewayEndpoints:
    """The addresses at which a worker connects to the gateways."""

    endpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkersKeys:
    """The public keys of the workers whose connections gateways accept."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AccessItem:
    """The data with which gateways verify API keys and session tokens."""

    secret: bytes
    needs_key: bool
    signers: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class KeyItem:
    key_id: str
    record: bytes


@dataclass(frozen=True, slots=True)
class RecordItem:
    """A record that a feature of the manager publishes to the same feature in the gateways."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class TokenItem:
    """The data with which workers verify session tokens."""

    needs_key: bool = False
    signers: tuple[tuple[str, bytes], ...] = ()
    revoked: tuple[str, ...] = ()  # ids of revoked and deleted keys
    expires_at: tuple[tuple[str, float], ...] = ()  # of keys that expire, by id


@dataclass(frozen=True, slots=True)
class OpenEndpoint:
    """Instructs the worker to open its endpoint for direct clients."""


GatewayUpdate = BlockView | NameRoute | GatewayItem | WorkersKeys | AccessItem | KeyItem | RecordItem
WorkerUpdate = AssignedBlock | GatewayEndpoints | TokenItem | OpenEndpoint


class Publisher:
    def __init__(self) -> None:
        self.view: VersionedMap[GatewayUpdate] = VersionedMap()
        self._assignments: dict[str, VersionedMap[WorkerUpdate]] = {}  # by worker
        self._forgotten = 0  # the highest revision of removed assignments
        self._given: dict[str, set[str]] = {}  # by block, the workers whose assignment contains it
        self._known: dict[str, set[str]] = {}  # by model, its blocks
        self._assigned: dict[str, AssignedBlock] = {}  # by block, its item in the workers' assignments
        self._tokens = TokenItem()

    def list_blocks(self) -> list[BlockView]:
        return [item for item in self.view.get_items().values() if isinstance(item, BlockView)]

    def get_assignment(self, worker: str) -> VersionedMap[WorkerUpdate]:
        return self._assignments[worker]

    def publish_blocks(self, table: BlockTable, state: DesiredState) -> bool:
        """Publish the changes of the block table; return whether anything changed.

        Only the models and workers that changed are computed again. At 1,000 blocks and 100 workers this takes 0.02 ms
        per report; computing all models and workers takes 10 to 40 ms.
        """
        changes = table.take_changes()
        for model in sorted(changes.models):
            self._publish_model(model, table, state)
        for model in sorted(changes.states - changes.models):
            self._publish_views(table.list_model_blocks(model), state.routings.get(model, ""))
        for worker in changes.workers & table.list_workers():
            self._get_or_create_map(worker).put(GATEWAYS, _list_gateway_endpoints(state))
            self._get_or_create_map(worker).put(ACCESS, self._tokens)
            for block in table.list_assigned_blocks():
                if worker in table.find_assigned_workers(block):
                    self._add_to_assignment(worker, block.block_id)
        return bool(changes)

    def publish_gateways(self, state: DesiredState) -> None:
        self.view.put(GATEWAYS, GatewayItem(state.membership, state.gateways.list_members()))
        for items in self._assignments.values():
            items.put(GATEWAYS, _list_gateway_endpoints(state))

    def publish_workers_keys(self, keys: Iterable[str]) -> None:
        """Publish the public keys of all workers; the keys of replaced processes become invalid."""
        self.view.put(WORKERS_KEYS, WorkersKeys(tuple(sorted(key for key in keys if key))))

    def publish_routes(self, routes: Iterable[NameRoute]) -> None:
        self.view.replace({ROUTE + route.name: route for route in routes}, ROUTE)

    def publish_access(self, access: AccessView) -> None:
        signers = tuple(sorted(access.signers.items()))
        self.view.put(ACCESS, AccessItem(access.secret, access.needs_key, signers))
        expires_at = tuple(sorted(access.expires_at.items()))
        self._tokens = TokenItem(access.needs_key, signers, tuple(sorted(access.revoked)), expires_at)
        for items in self._assignments.values():
            items.put(ACCESS, self._tokens)
        keys = {KEY + key_id: KeyItem(key_id, record) for key_id, record in access.keys.items()}
        self.view.replace(keys, KEY)

    def publish_records(self, records: Mapping[str, bytes], prefix: str) -> None:
        """Publish a feature's records, whose keys begin with `prefix`."""
        self.view.replace({RECORD + key: RecordItem(key, value) for key, value in records.items()}, RECORD + prefix)

    def open_direct_endpoint(self, worker: str) -> None:
        """Instruct the worker to open its endpoint for direct clients, for as long as the worker is attached."""
        if (items := self._assignments.get(worker)) is not None:
            items.put(ENDPOINT, OpenEndpoint())

    def forget_worker(self, worker: str) -> None:
        forgotten = self._assignments.pop(worker, None)
        if forgotten is not None:
            self._forgotten = max(self._forgotten, forgotten.revision)
        for given in self._given.values():
            given.discard(worker)

    def _publish_model(self, model: str, table: BlockTable, state: DesiredState) -> None:
        blocks = table.list_model_blocks(model)
        self._publish_views(blocks, state.routings.get(model, ""))
        for block in blocks:
            self._update_assignments(block, table.find_assigned_workers(block))
        known = {block.block_id for block in blocks}
        for block_id in self._known.get(model, set()) - known:
            self.view.remove(BLOCK + block_id)
            for worker in self._given.pop(block_id):
                self._remove_from_assignment(worker, block_id)
            del self._assigned[block_id]
        self._known[model] = known

    def _publish_views(self, blocks: Iterable[DeployedBlock], routing: str) -> None:
        for block in blocks:
            if block.is_shown:
                self.view.put(BLOCK + block.block_id, _build_block_view(block, routing))

    def _update_assignments(self, block: DeployedBlock, workers: frozenset[str]) -> None:
        block_id, assigned = block.block_id, _build_assigned_block(block)
        given = self._given.setdefault(block_id, set())
        is_same, self._assigned[block_id] = self._assigned.get(block_id) == assigned, assigned
        for worker in given - workers:
            self._remove_from_assignment(worker, block_id)
        for worker in workers - given if is_same else workers:
            self._add_to_assignment(worker, block_id)
        given &= workers

    def _add_to_assignment(self, worker: str, block_id: str) -> None:
        self._get_or_create_map(worker).put(BLOCK + block_id, self._assigned[block_id])
        self._given[block_id].add(worker)

    def _get_or_create_map(self, worker: str) -> VersionedMap[WorkerUpdate]:
        """Return the worker's map; create the map if it does not exist.

        The revisions of a new map follow those of all removed maps, because a worker that returns may have seen a
        revision of a removed map.
        """
        if worker not in self._assignments:
            self._assignments[worker] = VersionedMap(last_revision=self._forgotten)
        return self._assignments[worker]

    def _remove_from_assignment(self, worker: str, block_id: str) -> None:
        if (items := self._assignments.get(worker)) is not None:
            items.remove(BLOCK + block_id)


def _build_assigned_block(block: DeployedBlock) -> AssignedBlock:
    return AssignedBlock(
        block.block_id, block.model, block.version, block.folder, block.revision, block.replaces, block.is_new
    )


def _list_gateway_endpoints(state: DesiredState) -> GatewayEndpoints:
    return GatewayEndpoints(tuple(sorted(each.endpoint for each in state.gateways.gateways)))


def _build_block_view(block: DeployedBlock, routing: str) -> BlockView:
    record = block.record
    details = BlockDetails(labels=record.labels, metadata=record.metadata, replicas=record.replicas)
    return BlockView(
        block.block_id,
        block.model,
        block.version,
        *block.compute_state(),
        routing,
        block.has_served,
        block.is_new,
        details.model_dump_json() if details != NO_DETAILS else "",
    )
