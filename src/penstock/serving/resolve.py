"""Resolution of a model's name and version to a block. Pure: no I/O."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.core.blocks import SERVABLE, BlockDescription, BlockState, BlockView
from penstock.core.cluster.routes import NameRoute
from penstock.core.errors import Forbidden, ModelNotReady, PenstockError, UnknownModel
from penstock.core.principals import ANYBODY, Principal
from penstock.core.requests import InferRequest
from penstock.features.rollouts.splits import Split

WITHDRAWN = "withdrawn"  # an error's reason: the block was withdrawn before the request ran; another version may run it


class Resolver:
    """Resolves names from the manager's list of blocks and the blocks that workers hold.

    A block that was ready stays resolvable while it has no workers, so that requests wait instead of failing. It
    stops being resolvable when the manager reports it as unloaded or failed, or no longer lists it.
    A name without a version resolves to the newest version that the manager reports as ready and workers hold; a
    replaced version keeps the name until workers with its successor have joined. If a route exists for a name, the
    route decides. A block id is a name too. A principal cannot see the blocks that it may not call.
    """

    def __init__(self, draw: Callable[[], float] = lambda: 0.0) -> None:
        """Create a resolver without blocks. `draw` returns random numbers in [0, 1), to divide requests."""
        self.revision = 0  # rises when blocks or their states change
        self.has_cluster_state = False  # True once the manager has sent its list of blocks
        self._views: dict[str, BlockView] = {}
        self._descriptions: dict[str, BlockDescription] = {}
        self.held_block_ids: set[str] = set()  # blocks that a worker offers to this gateway
        self._retirement_errors: dict[str, PenstockError] = {}
        # Blocks by (name, version). The version is empty for a block id, and for a name without a version.
        self._unrouted_blocks: dict[tuple[str, str], BlockDescription] = {}  # ignoring routes
        self._blocks_by_name: dict[
            tuple[str, str], BlockDescription
        ] = {}  # with routes; a split name gives its primary block
        self._unsplit_blocks: dict[tuple[str, str], BlockDescription] = {}  # with routes, without split names
        self._draw = draw
        self._routes: dict[str, NameRoute] = {}
        self._splits: dict[str, Split] = {}

    def set_views(self, views: Sequence[BlockView]) -> dict[str, PenstockError]:
        """Set the manager's list of blocks; return the withdrawn blocks, each with the error for its requests."""
        self.has_cluster_state = True
        self._views = {view.block_id: view for view in views}
        return self._rebuild_tables()

    def set_routes(self, routes: Iterable[NameRoute]) -> None:
        self._routes = {route.name: route for route in routes}
        self._apply_routes()

    def set_held_blocks(self, held_blocks: Mapping[str, BlockDescription]) -> dict[str, PenstockError]:
        self.held_block_ids = set(held_blocks)
        for block_id, block in held_blocks.items():
            # An unchanged block stays the same object: other parts keep data per object.
            if self._descriptions.get(block_id) != block:
                self._descriptions[block_id] = block
        return self._rebuild_tables()

    def resolve(self, model: str, version: str, principal: Principal = ANYBODY) -> BlockDescription:
        """Return the block for a model's name and version, or raise UnknownModel, ModelNotReady or Forbidden.

        The block may be dormant, so that its worker loads it on demand. `is_described` is False for a block that was
        never loaded.
        """
        block = self._blocks_by_name.get((model, version))
        if block is None:
            raise self._explain_unresolved(model, version, principal)
        if principal.is_restricted:
            self._check_callable(principal, model, version, block)
        return block

    def choose(self, request: InferRequest) -> BlockDescription:
        """Return the block that runs this request. Unlike `resolve`, divide a split name's requests by weight."""
        block = self._unsplit_blocks.get((request.model, request.version))
        if block is None:
            split = None if request.version else self._splits.get(request.model)
            if split is None or split.primary is None:
                raise self._explain_unresolved(request.model, request.version, request.principal)
            block = split.choose(request)
        if request.principal.is_restricted:
            self._check_callable(request.principal, request.model, request.version, block)
        return block

    def choose_replacement(
        self, request: InferRequest, withdrawn: BlockDescription, error: ModelNotReady
    ) -> BlockDescription:
        """Return the block that replaced a withdrawn block, for a request that failed with this error.

        Raise the error if the request may have run or named a version, or if no other block serves its model name.
        """
        if error.reason != WITHDRAWN or request.version:
            raise error
        block = self.choose(request)
        if block.block_id == withdrawn.block_id:
            raise error
        return block

    def find_split(self, name: str) -> Split | None:
        return self._splits.get(name)

    def find_block(self, block_id: str) -> BlockDescription | None:
        """Return the block with this id, or None if it cannot be called."""
        return self._blocks_by_name.get((block_id, ""))

    def find_successor(self, block_id: str) -> BlockDescription | None:
        """Return the block that now serves the model name of a withdrawn block, or None if no block does."""
        view = self._views.get(block_id)
        return None if view is None else self._blocks_by_name.get((view.model, ""))

    def is_current(self, block: BlockDescription) -> bool:
        """Return whether this description of the block is still current."""
        return self._descriptions.get(block.block_id) is block

    def is_ready(self, model: str, version: str = "") -> bool:
        block = self._blocks_by_name.get((model, version))
        return block is not None and block.block_id in self.held_block_ids

    def may_change(self, principal: Principal, model: str) -> bool:
        """Return whether the principal may call every block of the model, and so may change the model."""
        block_ids = [view.block_id for view in self._views.values() if view.model == model]
        return all(principal.may_use(model, block_id) for block_id in block_ids or [""])

    def has_caught_up(self) -> bool:
        """Return whether the manager's list has arrived, and workers hold every block that is servable in the list."""
        return self.has_cluster_state and all(
            view.block_id in self.held_block_ids for view in self._views.values() if view.state in SERVABLE
        )

    def list_views(self, principal: Principal = ANYBODY) -> list[BlockView]:
        return [view for view in self._views.values() if principal.may_use(view.model, view.block_id)]

    def list_blocks(self, principal: Principal = ANYBODY) -> list[BlockDescription]:
        """Return the blocks that the principal may call, each once."""
        found = {block.block_id: block for block in self._blocks_by_name.values()}
        return [block for block in found.values() if principal.may_use(block.model, block.block_id)]

    def list_versions(self, model: str, principal: Principal = ANYBODY) -> list[str]:
        found = [block for (name, version), block in self._blocks_by_name.items() if name == model and version]
        return sorted({block.version for block in found if principal.may_use(model, block.block_id)}, key=int)

    def _rebuild_tables(self) -> dict[str, PenstockError]:
        self.revision += 1
        self._unrouted_blocks = {}
        for block in sorted(self._descriptions.values(), key=lambda known: int(known.version)):
            view = self._views.get(block.block_id)
            if self._is_served(block.block_id, view):
                self._unrouted_blocks[block.block_id, ""] = self._unrouted_blocks[block.model, block.version] = block
                continue
            why = f"model '{block.model}' version {block.version} is {_describe_state(view)}"
            self._retirement_errors[block.block_id] = ModelNotReady(why, reason=WITHDRAWN)
            if block.block_id not in self.held_block_ids:
                del self._descriptions[block.block_id]
        wanted = {view.model for view in self._views.values() if view.state is not BlockState.UNLOADED}
        for block in sorted(self._descriptions.values(), key=self._sort_key):
            if block.model in wanted or not self._views:
                self._unrouted_blocks[block.model, ""] = block
        for block in self._unrouted_blocks.values():
            self._retirement_errors.pop(block.block_id, None)
        self._apply_routes()
        return self._retirement_errors

    def _apply_routes(self) -> None:
        """Rebuild the name tables with the routes. Ignore a route if none of its blocks can be called."""
        if not self._routes:
            self._splits, self._blocks_by_name, self._unsplit_blocks = {}, self._unrouted_blocks, self._unrouted_blocks
            return
        blocks = {block.block_id: block for block in self._unrouted_blocks.values()}
        held = {block_id: block for block_id, block in blocks.items() if block_id in self.held_block_ids}
        splits: dict[str, Split] = {}
        self._blocks_by_name, self._unsplit_blocks = dict(self._unrouted_blocks), dict(self._unrouted_blocks)
        for name, route in self._routes.items():
            split = splits[name] = self._splits.get(name) or Split(route, {}, self._draw)
            split.update(route, held)
            if split.primary is None:
                split.update(route, blocks)
            if split.primary is not None:
                self._blocks_by_name[name, ""] = split.primary
                self._unsplit_blocks.pop((name, ""), None)
        self._splits = splits

    def _sort_key(self, block: BlockDescription) -> tuple[bool, bool, bool, int]:
        """Return a block's sort key. The highest of a model's blocks serves the model's name without a version."""
        view = self._views.get(block.block_id)
        is_held = block.block_id in self.held_block_ids
        is_servable = view is None or view.state in SERVABLE
        return is_held and is_servable, is_held, is_servable, int(block.version)

    def _is_served(self, block_id: str, view: BlockView | None) -> bool:
        if view is None:
            # Until the manager's list comes, every block that workers hold may be called.
            return block_id in self.held_block_ids and not self._views
        if view.state is BlockState.FAILED:
            return block_id in self.held_block_ids  # it failed on some workers, but others hold it
        return view.state is not BlockState.UNLOADED

    def _check_callable(self, principal: Principal, name: str, version: str, block: BlockDescription) -> None:
        """Raise Forbidden or UnknownModel unless the principal may call the block by its model or the route's name."""
        is_routed = not version and name in self._routes
        if principal.may_use(block.model, block.block_id) or (is_routed and principal.may_use(name, block.block_id)):
            return
        if not version and any(view.model == name for view in self.list_views(principal)):
            raise Forbidden(
                f"the key '{principal.name}' may call other versions of '{name}', but not the one that '{name}' now "
                "resolves to: name the version or the block id"
            )
        raise self._explain_unresolved(name, version, principal)

    def _find_visible_names(self, principal: Principal) -> list[str]:
        routes = [
            route.name
            for route in self._routes.values()
            if any(principal.may_use(route.name, block_id) for block_id in route.block_ids())
        ]
        return sorted({view.model for view in self.list_views(principal)}.union(routes))

    def _explain_unresolved(self, model: str, version: str, principal: Principal) -> PenstockError:
        if (block := self._views.get(model)) is not None and principal.may_use(block.model, model) and not version:
            why = "has no worker at this gateway yet" if block.state in SERVABLE else f"is {_describe_state(block)}"
            return ModelNotReady(f"block '{model}' of model '{block.model}' {why}")
        views = [view for view in self.list_views(principal) if view.model == model]
        if not views:
            names = self._find_visible_names(principal)
            if model in self._routes and model in names and not version:
                return ModelNotReady(f"no block that serves '{model}' has a worker at this gateway yet")
            return UnknownModel(f"unknown model '{model}'; this server has: {', '.join(names) or 'none yet'}")
        # For a name without a version, report the state of the newest version that is not unloaded.
        for view in sorted(views, key=lambda each: (each.state is BlockState.UNLOADED, -int(each.version))):
            if version in ("", view.version):
                if view.state in SERVABLE:
                    return ModelNotReady(f"model '{model}' version {view.version} has no worker at this gateway yet")
                return ModelNotReady(f"model '{model}' version {view.version} is {_describe_state(view)}")
        known = ", ".join(view.version for view in views)
        return UnknownModel(f"model '{model}' has no version '{version}'; it has {known}")


def _describe_state(view: BlockView | None) -> str:
    if view is None:
        return "removed"
    return f"{view.state} ({view.reason})" if view.state is BlockState.FAILED else str(view.state)
