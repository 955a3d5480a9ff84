"""From a model's name and version to its block. Decides; never acts."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.core.blocks import SERVABLE, BlockDescription, BlockState, BlockView
from penstock.core.errors import Forbidden, ModelNotReady, PenstockError, UnknownModel
from penstock.core.principals import ANYBODY, Principal
from penstock.core.requests import InferRequest
from penstock.core.routes import NameRoute
from penstock.serving.splits import Split

WITHDRAWN = "withdrawn"  # the reason of an error: nothing was run, and another version may run it


class Resolver:
    """Joins what the manager wants with what the workers hold.

    A block that was ready stays resolvable while its workers are away, so that requests wait for them
    rather than fail; it goes when the manager says that it is unloaded or failed, or no longer names it.
    A name alone is the newest version that the manager calls ready and workers hold. One that was replaced answers
    for the name until its successor's workers have come here. A route says otherwise for its name, and a block's id is
    a name of its own. What a principal may not ask is to it as if it were not there.
    """

    def __init__(self, draw: Callable[[], float] = lambda: 0.0) -> None:
        """`draw` gives numbers from 0 to below 1, by which requests are split."""
        self.has_heard = False  # from the manager
        self._views: dict[str, BlockView] = {}
        self._known: dict[str, BlockDescription] = {}
        self.held: set[str] = set()  # blocks that some worker offers here
        self._retired: dict[str, PenstockError] = {}
        self._plain: dict[tuple[str, str], BlockDescription] = {}  # without routes
        self._table: dict[tuple[str, str], BlockDescription] = {}  # with what describes a name that is split
        self._whole: dict[tuple[str, str], BlockDescription] = {}  # without such names
        self._draw = draw
        self._routes: dict[str, NameRoute] = {}
        self._splits: dict[str, Split] = {}

    def cluster_changed(self, views: Sequence[BlockView]) -> dict[str, PenstockError]:
        """Returns the blocks that take no more requests, with what to tell those who wait for them."""
        self.has_heard = True
        self._views = {view.block_id: view for view in views}
        return self._rebuild()

    def routes_changed(self, routes: Iterable[NameRoute]) -> None:
        self._routes = {route.name: route for route in routes}
        self._split()

    def workers_changed(self, held: Mapping[str, BlockDescription]) -> dict[str, PenstockError]:
        self.held = set(held)
        for block_id, block in held.items():
            # What is as it was stays the same object: others keep what they found out about it.
            if self._known.get(block_id) != block:
                self._known[block_id] = block
        return self._rebuild()

    def resolve(self, model: str, version: str, principal: Principal = ANYBODY) -> BlockDescription:
        """A dormant block is resolved, too: its worker loads it. What was never loaded `is_described` not yet."""
        block = self._table.get((model, version))
        if block is None:
            raise self._unknown(model, version, principal)
        if principal.is_bound:
            self._check(principal, model, version, block)
        return block

    def choose(self, request: InferRequest) -> BlockDescription:
        """What answers this request: as `resolve`, but for a name that is split."""
        block = self._whole.get((request.model, request.version))
        if block is None:
            split = None if request.version else self._splits.get(request.model)
            if split is None or split.primary is None:
                raise self._unknown(request.model, request.version, request.principal)
            block = split.choose(request)
        if request.principal.is_bound:
            self._check(request.principal, request.model, request.version, block)
        return block

    def choose_anew(self, request: InferRequest, withdrawn: BlockDescription, error: ModelNotReady) -> BlockDescription:
        """What answers now; raises the error unless it is another, and the block went before the request ran."""
        if error.reason != WITHDRAWN or request.version:
            raise error
        block = self.choose(request)
        if block.block_id == withdrawn.block_id:
            raise error
        return block

    def split(self, name: str) -> Split | None:
        return self._splits.get(name)

    def block(self, block_id: str) -> BlockDescription | None:
        """One that may be called."""
        return self._table.get((block_id, ""))

    def heir(self, block_id: str) -> BlockDescription | None:
        """What answers for the model of a block that takes no more requests."""
        view = self._views.get(block_id)
        return None if view is None else self._table.get((view.model, ""))

    def is_current(self, block: BlockDescription) -> bool:
        """Whether the block is still as it was described: of the same files on all workers."""
        return self._known.get(block.block_id) is block

    def is_ready(self, model: str, version: str = "") -> bool:
        block = self._table.get((model, version))
        return block is not None and block.block_id in self.held

    def may_change(self, principal: Principal, model: str) -> bool:
        """What is done to a model is done to all its blocks."""
        block_ids = [view.block_id for view in self._views.values() if view.model == model]
        return all(principal.may_ask(model, block_id) for block_id in block_ids or [""])

    def has_caught_up(self) -> bool:
        """The manager has spoken, and workers have come with all that it calls ready or dormant."""
        return self.has_heard and all(
            view.block_id in self.held for view in self._views.values() if view.state in SERVABLE
        )

    def views(self, principal: Principal = ANYBODY) -> list[BlockView]:
        return [view for view in self._views.values() if principal.may_ask(view.model, view.block_id)]

    def blocks(self, principal: Principal = ANYBODY) -> list[BlockDescription]:
        """The blocks that may be called, each once."""
        found = {block.block_id: block for block in self._table.values()}
        return [block for block in found.values() if principal.may_ask(block.model, block.block_id)]

    def versions(self, model: str, principal: Principal = ANYBODY) -> list[str]:
        found = [block for (name, version), block in self._table.items() if name == model and version]
        return sorted({block.version for block in found if principal.may_ask(model, block.block_id)}, key=int)

    def _rebuild(self) -> dict[str, PenstockError]:
        self._plain = {}
        for block in sorted(self._known.values(), key=lambda known: int(known.version)):
            view = self._views.get(block.block_id)
            if self._is_served(block.block_id, view):
                self._plain[block.block_id, ""] = self._plain[block.model, block.version] = block
                continue
            why = f"model '{block.model}' version {block.version} is {_standing(view)}"
            self._retired[block.block_id] = ModelNotReady(why, reason=WITHDRAWN)
            if block.block_id not in self.held:
                del self._known[block.block_id]
        wanted = {view.model for view in self._views.values() if view.state is not BlockState.UNLOADED}
        for block in sorted(self._known.values(), key=self._fitness):
            if block.model in wanted or not self._views:
                self._plain[block.model, ""] = block
        for block in self._plain.values():
            self._retired.pop(block.block_id, None)
        self._split()
        return self._retired

    def _split(self) -> None:
        """A name whose route has no block that can be asked is as one without a route."""
        if not self._routes:
            self._splits, self._table, self._whole = {}, self._plain, self._plain
            return
        blocks = {block.block_id: block for block in self._plain.values()}
        held = {block_id: block for block_id, block in blocks.items() if block_id in self.held}
        splits: dict[str, Split] = {}
        self._table, self._whole = dict(self._plain), dict(self._plain)
        for name, route in self._routes.items():
            split = splits[name] = self._splits.get(name) or Split(route, {}, self._draw)
            split.update(route, held)
            if split.primary is None:
                split.update(route, blocks)
            if split.primary is not None:
                self._table[name, ""] = split.primary
                self._whole.pop((name, ""), None)
        self._splits = splits

    def _fitness(self, block: BlockDescription) -> tuple[bool, bool, bool, int]:
        """To answer for its model: the higher, the better."""
        view = self._views.get(block.block_id)
        is_held = block.block_id in self.held
        is_servable = view is None or view.state in SERVABLE
        return is_held and is_servable, is_held, is_servable, int(block.version)

    def _is_served(self, block_id: str, view: BlockView | None) -> bool:
        if view is None:
            # The manager may not have spoken yet; what workers hold may be called.
            return block_id in self.held and not self._views
        if view.state is BlockState.FAILED:
            return block_id in self.held  # on some workers
        return view.state is not BlockState.UNLOADED

    def _check(self, principal: Principal, name: str, version: str, block: BlockDescription) -> None:
        """A key may be for a route's name as for a model's."""
        is_routed = not version and name in self._routes
        if principal.may_ask(block.model, block.block_id) or (is_routed and principal.may_ask(name, block.block_id)):
            return
        if not version and any(view.model == name for view in self.views(principal)):
            raise Forbidden(
                f"the key '{principal.name}' may ask other blocks of '{name}', but not the one that answers for the "
                "name: ask those by their version or id"
            )
        raise self._unknown(name, version, principal)

    def _names(self, principal: Principal) -> list[str]:
        """What it may ask for."""
        routes = [
            route.name
            for route in self._routes.values()
            if any(principal.may_ask(route.name, block_id) for block_id in route.block_ids())
        ]
        return sorted({view.model for view in self.views(principal)}.union(routes))

    def _unknown(self, model: str, version: str, principal: Principal) -> PenstockError:
        if (block := self._views.get(model)) is not None and principal.may_ask(block.model, model) and not version:
            why = "has no worker at this gateway yet" if block.state in SERVABLE else f"is {_standing(block)}"
            return ModelNotReady(f"block '{model}' of model '{block.model}' {why}")
        views = [view for view in self.views(principal) if view.model == model]
        if not views:
            names = self._names(principal)
            if model in self._routes and model in names and not version:
                return ModelNotReady(f"no block that answers for '{model}' has a worker at this gateway yet")
            return UnknownModel(f"unknown model '{model}'; this server has: {', '.join(names) or 'none yet'}")
        # Of a name alone, the newest that is wanted says what is the matter.
        for view in sorted(views, key=lambda each: (each.state is BlockState.UNLOADED, -int(each.version))):
            if version in ("", view.version):
                if view.state in SERVABLE:
                    return ModelNotReady(f"model '{model}' version {view.version} has no worker at this gateway yet")
                return ModelNotReady(f"model '{model}' version {view.version} is {_standing(view)}")
        known = ", ".join(view.version for view in views)
        return UnknownModel(f"model '{model}' has no version '{version}'; it has {known}")


def _standing(view: BlockView | None) -> str:
    if view is None:
        return "removed"
    return f"{view.state} ({view.reason})" if view.state is BlockState.FAILED else str(view.state)
