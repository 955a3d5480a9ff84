"""What workers and gateways are told: a ledger for each worker, and one for the gateways. Decides; never acts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.core.blocks import BlockView, GatewayMember
from penstock.core.cluster.access_view import AccessView
from penstock.core.routes import NameRoute
from penstock.manager.desired import DesiredState
from penstock.manager.registry import DeployedBlock, Registry
from penstock.manager.telling.ledger import Ledger

GATEWAYS, ACCESS = "gateways", "access"
BLOCK, ROUTE, KEY = "block/", "route/", "key/"


@dataclass(frozen=True, slots=True)
class AssignedBlock:
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
class ToldAccess:
    secret: bytes
    is_asking: bool


@dataclass(frozen=True, slots=True)
class ToldKey:
    key_id: str
    record: bytes


Shown = BlockView | NameRoute | ToldGateways | ToldAccess | ToldKey
Given = AssignedBlock | Endpoints


class Boards:
    def __init__(self) -> None:
        self.view: Ledger[Shown] = Ledger()
        self._assignments: dict[str, Ledger[Given]] = {}  # by worker
        self._forgotten = 0  # the highest revision of those that are no more
        self._given: dict[str, set[str]] = {}  # by block, the workers in whose assignment it is
        self._shown: dict[str, set[str]] = {}  # by model, the blocks in the view
        self._wanted: dict[str, tuple[AssignedBlock, frozenset[str]]] = {}  # by block, as it was last assigned

    def blocks(self) -> list[BlockView]:
        return [shown for shown in self.view.items().values() if isinstance(shown, BlockView)]

    def assignment(self, worker: str) -> Ledger[Given]:
        return self._assignments[worker]

    def publish(self, registry: Registry, state: DesiredState) -> bool:
        """Brings everything up to date that the registry says is another; whether there was any."""
        models, workers = registry.take_touched()
        for model in sorted(models):
            self._publish_model(model, registry, state)
        attached = registry.workers()
        for worker in workers & attached:
            ledger = self._ledger(worker)
            ledger.put(GATEWAYS, _endpoints(state))
            for block in registry.assigned():
                if worker in registry.assigned_to(block):
                    self._give(worker, _assigned(block))
        return bool(models or workers)

    def gateways_changed(self, state: DesiredState) -> None:
        self.view.put(GATEWAYS, ToldGateways(state.membership, state.gateways.members()))
        for ledger in self._assignments.values():
            ledger.put(GATEWAYS, _endpoints(state))

    def routes_changed(self, routes: Iterable[NameRoute]) -> None:
        self._replace(ROUTE, {ROUTE + route.name: route for route in routes})

    def access_changed(self, access: AccessView) -> None:
        self.view.put(ACCESS, ToldAccess(access.secret, access.is_asking))
        self._replace(KEY, {KEY + key_id: ToldKey(key_id, record) for key_id, record in access.keys.items()})

    def _replace(self, prefix: str, shown: Mapping[str, Shown]) -> None:
        """Of these keys there are no others."""
        for key in [key for key in self.view.items() if key.startswith(prefix) and key not in shown]:
            self.view.remove(key)
        for key, each in shown.items():
            self.view.put(key, each)

    def forget(self, worker: str) -> None:
        forgotten = self._assignments.pop(worker, None)
        if forgotten is not None:
            self._forgotten = max(self._forgotten, forgotten.revision)
        for given in self._given.values():
            given.discard(worker)

    def _publish_model(self, model: str, registry: Registry, state: DesiredState) -> None:
        routing = state.routings.get(model, "")
        blocks = {block.block_id: block for block in registry.of_model(model)}
        for block_id, block in blocks.items():
            if block.is_shown:
                self.view.put(BLOCK + block_id, _view(block, routing))
                self._shown.setdefault(model, set()).add(block_id)
            self._assign(block, registry.assigned_to(block))
        for block_id in self._shown.get(model, set()) - blocks.keys():
            self._shown[model].discard(block_id)
            self._wanted.pop(block_id, None)
            self.view.remove(BLOCK + block_id)
            for worker in list(self._given.get(block_id, ())):
                self._take(worker, block_id)

    def _assign(self, block: DeployedBlock, workers: frozenset[str]) -> None:
        wanted = (_assigned(block), workers)
        if self._wanted.get(block.block_id) == wanted:
            return
        self._wanted[block.block_id] = wanted
        for worker in self._given.get(block.block_id, set()) - workers:
            self._take(worker, block.block_id)
        for worker in workers:
            self._give(worker, wanted[0])

    def _give(self, worker: str, block: AssignedBlock) -> None:
        self._ledger(worker).put(BLOCK + block.block_id, block)
        self._given.setdefault(block.block_id, set()).add(worker)

    def _ledger(self, worker: str) -> Ledger[Given]:
        """One that comes back may have heard an earlier one's revisions: they are none of this one's."""
        if worker not in self._assignments:
            self._assignments[worker] = Ledger(after=self._forgotten)
        return self._assignments[worker]

    def _take(self, worker: str, block_id: str) -> None:
        self._given[block_id].discard(worker)
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
