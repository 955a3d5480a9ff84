"""The rollouts of a cluster, performed by the manager that leads: routes told, records written, blocks let go."""

import asyncio
import time
from collections.abc import Sequence

import structlog
from pydantic import ValidationError

from penstock.core.blocks import BlockRole
from penstock.core.cluster.answer_counts import AnswerCounts
from penstock.core.error_text import first_problem
from penstock.core.errors import InvalidRequest, NotFound, PenstockError, UnknownModel
from penstock.manager.access.door import check_change, may_ask
from penstock.manager.desired import Folded, encode
from penstock.manager.manager import Manager
from penstock.manager.reign import Notice, Reign
from penstock.manager.rollouts.plan import RolledBlock, RolloutPhase, RolloutPlan, RolloutRecord
from penstock.manager.rollouts.rollout import (
    BlockSeen,
    CountsHeard,
    GatewayGone,
    LetGo,
    Rollout,
    RolloutAction,
    RolloutChanged,
    RolloutEvent,
    RolloutSignal,
)
from penstock.manager.rollouts.targets import RolloutTargets
from penstock.manager.tasks import Tasks
from penstock.manager.telling.etags import expecting
from penstock.manager.waiters import wait_at_most
from penstock.models.folder import NAME
from penstock.storage.metadata.base import Write
from penstock.telemetry.metrics import RolloutMetrics

log = structlog.get_logger()
now = time.monotonic
ROLLOUTS = "rollouts/"
TURN_S = 0.25
RETRY_S = 2.0


class Rollouts:
    """Used from the manager's event loop. What it knows it has from the store, or has written there."""

    def __init__(self, manager: Manager, metrics: RolloutMetrics) -> None:
        self._manager = manager
        self._metrics = metrics
        self._rollouts: dict[str, Rollout] = {}  # of this reign, by name
        self._unwritten: set[str] = set()
        self._told: list[Notice] = []  # with what is written next
        self._leaving: list[tuple[RolledBlock, BlockRole]] = []  # blocks that have no more use
        self._gateways: set[str] = set()
        self._is_due = asyncio.Event()
        self._changing = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._targets = RolloutTargets(manager)
        self._tasks = Tasks("rollouts")
        self.close = self._tasks.close
        manager.on_reign.append(self._begin)
        manager.on_folded.append(self._folded)
        manager.on_counts.append(self._counted)
        manager.before_load.append(self._make_way)
        manager.is_governed = self._is_governed

    def start(self) -> None:
        self._tasks.spawn(self._run_forever())

    # --- what operators ask

    async def begin(self, plan_json: str) -> str:
        """Returns the rollout's name."""
        try:
            plan = RolloutPlan.model_validate_json(plan_json)
        except ValidationError as error:
            raise InvalidRequest(f"{first_problem(error, 'the rollout')}; see docs/rollouts.md") from error
        async with self._changing:
            self._manager.check_leads()
            await self._start(plan)
        return plan.name

    async def pause(self, name: str, expected: str = "") -> None:
        """`expected`, as in the others: a tag of what was read, of which the write must be the last."""
        await self._ask(name, RolloutSignal.PAUSE, expected)

    async def resume(self, name: str, expected: str = "") -> None:
        await self._ask(name, RolloutSignal.RESUME, expected)

    async def undo(self, name: str, expected: str = "") -> None:
        """One whose old block is gone already is undone by another, back to it."""
        self._manager.check_leads()
        record = self._find(name).record
        old = self._manager.desired.blocks.get(record.old.block_id)
        is_kept = old is not None and old.record.role is BlockRole.CHOSEN and not record.is_old_gone
        if record.phase is not RolloutPhase.DONE or is_kept:
            await self._ask(name, RolloutSignal.UNDO, expected)
            return
        plan = RolloutPlan(name=name, new=str(record.old), steps=(100.0,), hold_s=0, min_answers=0)
        async with self._changing:
            self._check(name, expected)
            await self._start(plan)

    async def forget(self, name: str, expected: str = "") -> None:
        async with self._changing:
            self._manager.check_leads()
            rollout = self._find(name)
            self._check(name, expected)
            if not rollout.record.is_over:
                raise InvalidRequest(f"the rollout of '{name}' is {rollout.record.phase}: undo it first")
            await self._remove(name)

    def all(self, name: str = "") -> list[Rollout]:
        """Also for a manager that does not lead: as they were last written."""
        if not self._manager.epoch:
            self._read()
        if name:
            return [self._find(name)]
        return list(self._seen().values())

    # --- what the manager tells

    def _begin(self, reign: Reign) -> None:
        """Before a gateway hears anything of a reign, its routes are as the last one left them."""
        self._unwritten.clear()
        self._told.clear()
        self._leaving.clear()
        self._read()
        self._tell_routes(reign)

    def _folded(self, folded: Folded) -> None:
        if folded.has_gateways:
            here = {each.gateway_id for each in self._manager.desired.gateways.gateways}
            for gateway in self._gateways - here:
                for name in list(self._rollouts):
                    self._handle(name, GatewayGone(gateway))
            self._gateways = here

    def _counted(self, gateway: str, counts: Sequence[AnswerCounts]) -> None:
        named = {each.block_id for each in counts}
        for name, rollout in self._rollouts.items():
            blocks = (rollout.record.old.block_id, rollout.record.new.block_id)
            if not named.isdisjoint(blocks):
                self._metrics.count(name, dict(zip(blocks, ("old", "new"), strict=True)), counts)
                self._handle(name, CountsHeard(gateway, counts))

    async def _make_way(self, model: str) -> None:
        """Before a model is loaded anew: what a rollout that is over made of its name is no longer so."""
        for name, rollout in list(self._rollouts.items()):
            record = rollout.record
            if model not in (record.old.model, record.new.model):
                continue
            if not record.is_over:
                raise InvalidRequest(f"a rollout of '{name}' to {record.new} is {record.phase}: undo it, or let it end")
            if name == model:
                await self._remove(name)

    def _is_governed(self, model: str) -> bool:
        """Whether a rollout says which versions of the model are deployed."""
        return any(
            model in (rollout.record.old.model, rollout.record.new.model) and not rollout.record.is_past
            for rollout in self._rollouts.values()
        )

    # --- starting

    async def _start(self, plan: RolloutPlan) -> None:
        name = plan.name
        if not NAME.match(name):
            raise InvalidRequest(f"'{name[:80]}' is no name: letters, digits, '.', '_' and '-', at most 128")
        known = self._rollouts.get(name)
        if known is not None and not known.record.is_over:
            raise InvalidRequest(f"a rollout of '{name}' to {known.record.new} is {known.record.phase}: undo it first")
        old = self._serving(plan)
        new = self._targets.deployed(plan.new, name)
        check_change(old.model, [old.block_id])
        check_change(self._targets.meant(plan.new, name)[0], [] if new is None else [new.block_id])
        if new is not None and new.block_id == old.block_id:
            raise InvalidRequest(f"{old} answers for '{name}' already")

        if new is not None:
            record = RolloutRecord(plan=plan, old=old, new=RolledBlock.of(new), began=time.time())
            await self._manager.commit([_write(record)])
        else:
            model, version = self._targets.meant(plan.new, name)
            choice = await self._manager.choose(model, version)
            latest = choice._replace(versions=choice.versions[-1:], spares=(), is_beside=True)
            if (model, *latest.versions) == (old.model, old.version):
                raise InvalidRequest(f"{old} answers for '{name}' already")

            def record_of(block_id: str) -> RolloutRecord:
                rolled = RolledBlock(block_id=block_id, model=model, version=latest.versions[0])
                return RolloutRecord(plan=plan, old=old, new=rolled, began=time.time(), has_deployed=True)

            # With the block, or it would answer for its model's name if this manager ended just now.
            (block_id,) = await self._manager.deploy(latest, lambda block_ids: [_write(record_of(block_ids[0]))])
            record = record_of(block_id)
        self._rollouts[name] = Rollout(record, now())
        self._tell("rollout_started", name, f"from {old} to {record.new}")
        self._tell_routes(self._manager.reign)
        await self._write()
        await self._manager.notify()
        self._is_due.set()

    def _serving(self, plan: RolloutPlan) -> RolledBlock:
        """What answers for the name, or what the plan says."""
        known = self._rollouts.get(plan.name)
        if plan.old:
            block = self._targets.deployed(plan.old, plan.name)
            if block is None:
                raise UnknownModel(f"'{plan.old}' is not deployed: it cannot be what the name answers with before")
            return RolledBlock.of(block)
        if known is not None:
            return known.record.new if known.record.phase is RolloutPhase.DONE else known.record.old
        block = self._targets.newest(plan.name)
        if block is None:
            raise UnknownModel(
                f"nothing answers for '{plan.name}' now: deploy the model first, or say from which block (--from)"
            )
        return RolledBlock.of(block)

    # --- deciding and acting

    def revision(self, name: str) -> int:
        """Of its last write."""
        return self._manager.desired.revisions.get(ROLLOUTS + name, 0)

    def _check(self, name: str, expected: str) -> None:
        """Nobody else writes what this manager leads, so it is so until it is written."""
        with expecting(expected, ROLLOUTS + name, self._manager.desired.revisions):
            pass

    async def _ask(self, name: str, event: RolloutEvent, expected: str = "") -> None:
        async with self._changing:
            self._manager.check_leads()
            self._find(name)
            self._check(name, expected)
            self._handle(name, event)
            await self._write()
            await self._manager.notify()

    def _handle(self, name: str, event: RolloutEvent) -> None:
        rollout = self._rollouts[name]
        actions = rollout.handle(event, now())
        for action in actions:
            self._perform(name, rollout, action)
        if actions:
            self._tell_routes(self._manager.reign)

    def _perform(self, name: str, rollout: Rollout, action: RolloutAction) -> None:
        match action:
            case RolloutChanged(kind, text):
                self._unwritten.add(name)
                self._is_due.set()
                self._tell(kind, name, text)
            case LetGo(block):
                is_old = block.block_id == rollout.record.old.block_id
                self._leaving.append((block, BlockRole.SPARE if is_old else BlockRole.WITHDRAWN))
                self._is_due.set()

    def _tell(self, kind: str, name: str, text: str) -> None:
        self._told.append(Notice(kind, name, text))
        self._metrics.changed(name, kind.removeprefix("rollout_"), self._rollouts[name].record.weight)

    def _tell_routes(self, reign: Reign) -> None:
        gateways = len(self._manager.desired.gateways.gateways)
        routes = [rollout.route(gateways) for rollout in self._rollouts.values()]
        reign.set_routes([route for route in routes if route is not None])

    async def _run_forever(self) -> None:
        while True:
            await wait_at_most(self._is_due, TURN_S)
            self._is_due.clear()
            if not self._manager.epoch:
                continue
            try:
                await self._turn()
            except PenstockError as error:
                log.warning("rollouts_not_written", error=error.message)
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("bug", where="rollouts")  # without turns nothing would ever step or end
                await asyncio.sleep(RETRY_S)

    async def _turn(self) -> None:
        for name, rollout in list(self._rollouts.items()):
            for block_id in (rollout.record.new.block_id, rollout.record.old.block_id):
                if not rollout.record.is_over:
                    self._handle(name, BlockSeen(block_id, *self._targets.state(block_id)))
            self._handle(name, RolloutSignal.TICK)
        await self._manager.notify()
        await self._write()

    async def _write(self) -> None:
        async with self._writing:
            names, self._unwritten = self._unwritten & self._rollouts.keys(), set()
            told, self._told = self._told, []
            try:
                await self._manager.events.commit([_write(self._rollouts[name].record) for name in names], told)
            except PenstockError:
                self._unwritten |= names
                self._told = [*told, *self._told]
                raise
            while self._leaving:
                leaving = self._leaving.pop(0)
                try:
                    await self._let_go(*leaving)
                except PenstockError:
                    self._leaving.insert(0, leaving)
                    raise

    async def _let_go(self, block: RolledBlock, role: BlockRole) -> None:
        if block.block_id in self._manager.desired.blocks and not self._is_needed(block.block_id):
            await self._manager.change_block(block.block_id, role=role)

    async def _remove(self, name: str) -> None:
        await self._manager.commit([Write(ROLLOUTS + name, None)])
        self._rollouts.pop(name, None)
        self._metrics.forget(name)
        self._tell_routes(self._manager.reign)
        await self._manager.notify()

    # --- what is known

    def _read(self) -> None:
        self._rollouts = {}
        for key, value in self._manager.desired.others.items():
            if not key.startswith(ROLLOUTS):
                continue
            try:
                record = RolloutRecord.model_validate_json(value)
            except ValidationError as error:  # of another version of Penstock
                log.warning("rollout_passed_over", key=key, error=str(error))
                continue
            self._rollouts[record.plan.name] = Rollout(record, now())

    def _find(self, name: str) -> Rollout:
        seen = self._seen()
        if name not in seen:
            raise NotFound(f"there is no rollout of '{name}'; there are: {', '.join(seen) or 'none'}")
        return seen[name]

    def _seen(self) -> dict[str, Rollout]:
        """By whoever a call is for: those of blocks that it may ask."""
        return {
            name: rollout
            for name, rollout in sorted(self._rollouts.items())
            if all(may_ask(each.model, each.block_id) for each in (rollout.record.old, rollout.record.new))
        }

    def _is_needed(self, block_id: str) -> bool:
        return any(block_id in rollout.record.needed() for rollout in self._rollouts.values())


def _write(record: RolloutRecord) -> Write:
    return Write(ROLLOUTS + record.plan.name, encode(record))
