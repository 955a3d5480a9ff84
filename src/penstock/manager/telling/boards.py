"""What workers and gateways are told: a ledger for each worker, and one for the gateways. Decides; never acts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.blocks import BlockView, GatewayMember
from penstock.core.cluster.access_view import AccessView
from penstock.core.routes import NameRoute
from penstock.manager.deployed_block import DeployedBlock
from penstock.manager.desired import DesiredState
from penstock.manager.registry import Registry
from penstock.manager.telling.ledger import Ledger

GATEWAYS, ACCESS, WORKERS_KEYS, DOOR = "gateways", "access", "workers-keys", "door"
BLOCK, ROUTE, KEY = "block/", "route/", "key/"


class AssignedBlock(NamedTuple):
    block_id: str
    model: str
    version: str
    folder: str
    revision: int
    replaces: tuple[str, ...]
    is_new: bool


@dataclass(frozen=True, slots=True)
class ToldGateways:
    """The gateways of the cluster, as the others are told of them."""

    revision: int
    gateways: tuple[GatewayMember, ...]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a worker meets the gateways."""

    endpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkersKeys:
    """The public keys by which gateways let workers in."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ToldAccess:
    secret: bytes
    is_asking: bool
    signers: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class ToldKey:
    key_id: str
    record: bytes


@dataclass(frozen=True, slots=True)
class ToldTokens:
    """How workers know session tokens."""

    is_asking: bool = False
    signers: tuple[tuple[str, bytes], ...] = ()
    revoked: tuple[str, ...] = ()  # ids of keys


@dataclass(frozen=True, slots=True)
class OpenDoor:
    """Clients want to reach the worker."""


Shown = BlockView | NameRoute | ToldGateways | WorkersKeys | ToldAccess | ToldKey
Given = AssignedBlock | Endpoints | ToldTokens | OpenDoor


class Boards:
    def __init__(self) -> None:
        self.view: Ledger[Shown] = Ledger()
        self._assignments: dict[str, Ledger[Given]] = {}  # by worker
        self._forgotten = 0  # the highest revision of those that are no more
        self._given: dict[str, set[str]] = {}  # by block, the workers in whose assignment it is
        self._known: dict[str, set[str]] = {}  # by model, its blocks
        self._assigned: dict[str, AssignedBlock] = {}  # by block, as all have it in whose assignment it is
        self._tokens = ToldTokens()

    def blocks(self) -> list[BlockView]:
        return [shown for shown in self.view.items().values() if isinstance(shown, BlockView)]

    def assignment(self, worker: str) -> Ledger[Given]:
        return self._assignments[worker]

    def publish(self, registry: Registry, state: DesiredState) -> bool:
        """Brings everything up to date that the registry says is another; whether there was any."""
        touched = registry.take_touched()
        for model in sorted(touched.models):
            self._publish_model(model, registry, state)
        for model in sorted(touched.states - touched.models):
            self._show(registry.of_model(model), state.routings.get(model, ""))
        for worker in touched.workers & registry.workers():
            self._ledger(worker).put(GATEWAYS, _endpoints(state))
            self._ledger(worker).put(ACCESS, self._tokens)
            for block in registry.assigned():
                if worker in registry.assigned_to(block):
                    self._give(worker, block.block_id)
        return bool(touched)

    def gateways_changed(self, state: DesiredState) -> None:
        self.view.put(GATEWAYS, ToldGateways(state.membership, state.gateways.members()))
        for ledger in self._assignments.values():
            ledger.put(GATEWAYS, _endpoints(state))

    def workers_keys_changed(self, keys: Iterable[str]) -> None:
        """Those of all workers; of a process that is superseded nothing is left."""
        self.view.put(WORKERS_KEYS, WorkersKeys(tuple(sorted(key for key in keys if key))))

    def routes_changed(self, routes: Iterable[NameRoute]) -> None:
        self.view.replace({ROUTE + route.name: route for route in routes}, ROUTE)

    def access_changed(self, access: AccessView) -> None:
        signers = tuple(sorted(access.signers.items()))
        self.view.put(ACCESS, ToldAccess(access.secret, access.is_asking, signers))
        self._tokens = ToldTokens(access.is_asking, signers, tuple(sorted(access.revoked)))
        for ledger in self._assignments.values():
            ledger.put(ACCESS, self._tokens)
        keys = {KEY + key_id: ToldKey(key_id, record) for key_id, record in access.keys.items()}
        self.view.replace(keys, KEY)

    def open_door(self, worker: str) -> None:
        """For as long as it is there."""
        if (ledger := self._assignments.get(worker)) is not None:
            ledger.put(DOOR, OpenDoor())

    def forget(self, worker: str) -> None:
        forgotten = self._assignments.pop(worker, None)
        if forgotten is not None:
            self._forgotten = max(self._forgotten, forgotten.revision)
        for given in self._given.values():
            given.discard(worker)

    def _publish_model(self, model: str, registry: Registry, state: DesiredState) -> None:
        blocks = registry.of_model(model)
        self._show(blocks, state.routings.get(model, ""))
        for block in blocks:
            self._assign(block, registry.assigned_to(block))
        known = {block.block_id for block in blocks}
        for block_id in self._known.get(model, set()) - known:
            self.view.remove(BLOCK + block_id)
            for worker in self._given.pop(block_id):
                self._take(worker, block_id)
            del self._assigned[block_id]
        self._known[model] = known

    def _show(self, blocks: Iterable[DeployedBlock], routing: str) -> None:
        for block in blocks:
            if block.is_shown:
                self.view.put(BLOCK + block.block_id, _view(block, routing))

    def _assign(self, block: DeployedBlock, workers: frozenset[str]) -> None:
        block_id, assigned = block.block_id, _assigned(block)
        given = self._given.setdefault(block_id, set())
        is_same, self._assigned[block_id] = self._assigned.get(block_id) == assigned, assigned
        for worker in given - workers:
            self._take(worker, block_id)
        for worker in workers - given if is_same else workers:
            self._give(worker, block_id)
        given &= workers

    def _give(self, worker: str, block_id: str) -> None:
        self._ledger(worker).put(BLOCK + block_id, self._assigned[block_id])
        self._given[block_id].add(worker)

    def _ledger(self, worker: str) -> Ledger[Given]:
        """One that comes back may have heard an earlier one's revisions: they are none of this one's."""
        if worker not in self._assignments:
            self._assignments[worker] = Ledger(after=self._forgotten)
        return self._assignments[worker]

    def _take(self, worker: str, block_id: str) -> None:
        if (ledger := self._assignments.get(worker)) is not None:
            ledger.remove(BLOCK + block_id)


def _assigned(block: DeployedBlock) -> AssignedBlock:
    return AssignedBlock(
        block.block_id, block.model, block.version, block.folder, block.revision, block.replaces, block.is_new
    )


def _endpoints(state: DesiredState) -> Endpoints:
    return Endpoints(tuple(sorted(each.endpoint for each in state.gateways.gateways)))


def _view(block: DeployedBlock, routing: str) -> BlockView:
    return BlockView(
        block.block_id, block.model, block.version, *block.state(), routing, block.has_served, block.is_new
    )
