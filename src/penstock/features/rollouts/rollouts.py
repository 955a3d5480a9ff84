"""The rollouts of a cluster: the leader publishes their routes, writes their records and releases their blocks."""

import asyncio
import time

import structlog
from pydantic import ValidationError

from penstock.core.blocks import BlockRole
from penstock.core.error_text import describe_first_problem
from penstock.core.errors import InvalidRequest, NotFound, PenstockError, UnknownModel
from penstock.endpoints.guarded_server import check_change, may_use
from penstock.features.rollouts.rollout import (
    BlockSeen,
    CountsReported,
    GatewayLeft,
    ReleaseBlock,
    Rollout,
    RolloutAction,
    RolloutChanged,
    RolloutEvent,
    RolloutSignal,
)
from penstock.features.rollouts.rollout_plan import RolledBlock, RolloutPhase, RolloutPlan, RolloutRecord
from penstock.features.rollouts.targets import RolloutTargets
from penstock.manager.control_plane import ControlPlane
from penstock.manager.deploying.deployer import Deployer
from penstock.manager.desired_state import StateChanges, encode
from penstock.manager.feature import ManagerFeature, TrafficReport
from penstock.manager.publishing.etags import require_etag
from penstock.manager.term import EventDraft, Term
from penstock.manager.waiters import wait_at_most
from penstock.models.folder import NAME
from penstock.storage.metadata.metadata_store import Write
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.metrics import RolloutMetrics

log = structlog.get_logger()
now = time.monotonic
ROLLOUTS = "rollouts/"
TICK_S = 0.25
RETRY_S = 2.0


class Rollouts(ManagerFeature):
    """Performs the rollouts of a cluster, from the manager's event loop. Each rollout has a record in the store."""

    def __init__(self, control: ControlPlane, deployer: Deployer, metrics: RolloutMetrics) -> None:
        self._control = control
        self._deployer = deployer
        self._metrics = metrics
        self._rollouts: dict[str, Rollout] = {}  # of this term, by name
        self._unwritten: set[str] = set()
        self._drafts: list[EventDraft] = []  # events for the next write
        self._released: list[tuple[RolledBlock, BlockRole]] = []  # blocks that no rollout needs, with their new roles
        self._gateways: set[str] = set()
        self._is_due = asyncio.Event()
        self._changing = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._targets = RolloutTargets(control)
        self._tasks = BackgroundTasks("rollouts")

    def start(self) -> None:
        self._tasks.supervise("rollouts", self._run_once)

    async def close(self) -> None:
        await self._tasks.close()

    # --- requests of operators

    async def begin(self, plan_json: str) -> str:
        try:
            plan = RolloutPlan.model_validate_json(plan_json)
        except ValidationError as error:
            raise InvalidRequest(f"{describe_first_problem(error, 'the rollout')}; see docs/rollouts.md") from error
        async with self._changing:
            self._control.check_leads()
            await self._start(plan)
        return plan.name

    async def pause(self, name: str, expected: str = "") -> None:
        """Pause the rollout. `expected`, here and in other methods: the ETag that the record must have; empty: any."""
        await self._request_change(name, RolloutSignal.PAUSE, expected)

    async def resume(self, name: str, expected: str = "") -> None:
        await self._request_change(name, RolloutSignal.RESUME, expected)

    async def undo(self, name: str, expected: str = "") -> None:
        """Undo the rollout. If its old block was removed, start a new rollout back to that block."""
        self._control.check_leads()
        record = self._find(name).record
        old = self._control.desired.blocks.get(record.old.block_id)
        is_kept = old is not None and old.record.role is BlockRole.CHOSEN and not record.is_old_gone
        if record.phase is not RolloutPhase.DONE or is_kept:
            await self._request_change(name, RolloutSignal.UNDO, expected)
            return
        plan = RolloutPlan(name=name, new=str(record.old), steps=(100.0,), hold_s=0, min_answers=0)
        async with self._changing:
            self._check_unchanged(name, expected)
            await self._start(plan)

    async def forget(self, name: str, expected: str = "") -> None:
        async with self._changing:
            self._control.check_leads()
            rollout = self._find(name)
            self._check_unchanged(name, expected)
            if not rollout.record.is_over:
                raise InvalidRequest(f"the rollout of '{name}' is {rollout.record.phase}; undo it first")
            await self._remove(name)

    def list_rollouts(self, name: str = "") -> list[Rollout]:
        """Return all rollouts, or the rollout of a name. A manager that does not lead reads the last records."""
        if not self._control.epoch:
            self._read_records()
        if name:
            return [self._find(name)]
        return list(self._find_visible().values())

    # --- calls of the manager

    def term_started(self, term: Term) -> None:
        """Restore the routes of the last term, before any gateway receives an update of the new term."""
        self._unwritten.clear()
        self._drafts.clear()
        self._released.clear()
        self._read_records()
        self._publish_routes(term)

    def state_changed(self, state_changes: StateChanges) -> None:
        if state_changes.has_gateways:
            present = {each.gateway_id for each in self._control.desired.gateways.gateways}
            for gateway in self._gateways - present:
                for name in list(self._rollouts):
                    self._handle(name, GatewayLeft(gateway))
            self._gateways = present

    def traffic_reported(self, report: TrafficReport) -> None:
        named = {each.block_id for each in report.counts}
        for name, rollout in self._rollouts.items():
            blocks = (rollout.record.old.block_id, rollout.record.new.block_id)
            if not named.isdisjoint(blocks):
                self._metrics.count(name, dict(zip(blocks, ("old", "new"), strict=True)), report.counts)
                self._handle(name, CountsReported(report.gateway_id, report.counts))

    async def prepare_load(self, model: str) -> None:
        """Delete the record of a finished rollout of the model's name; raise InvalidRequest if it is under way."""
        for name, rollout in list(self._rollouts.items()):
            record = rollout.record
            if model not in (record.old.model, record.new.model):
                continue
            if not record.is_over:
                raise InvalidRequest(
                    f"a rollout of '{name}' to {record.new} is {record.phase}; undo it or wait for its end"
                )
            if name == model:
                await self._remove(name)

    def chooses_versions(self, model: str) -> bool:
        return any(
            model in (rollout.record.old.model, rollout.record.new.model) and not rollout.record.is_past
            for rollout in self._rollouts.values()
        )

    # --- starting

    async def _start(self, plan: RolloutPlan) -> None:
        name = plan.name
        if not NAME.match(name):
            raise InvalidRequest(f"invalid name '{name[:80]}': use at most 128 letters, digits, '.', '_' and '-'")
        known = self._rollouts.get(name)
        if known is not None and not known.record.is_over:
            raise InvalidRequest(f"a rollout of '{name}' to {known.record.new} is {known.record.phase}; undo it first")
        old = self._find_old_block(plan)
        new = self._targets.find_deployed(plan.new, name)
        check_change(old.model, [old.block_id])
        check_change(self._targets.parse(plan.new, name)[0], [] if new is None else [new.block_id])
        if new is not None and new.block_id == old.block_id:
            raise _make_already_serves_error(old, name)

        if new is not None:
            record = RolloutRecord(plan=plan, old=old, new=RolledBlock.from_desired_block(new), began=time.time())
            await self._control.commit([_write(record)])
        else:
            model, version = self._targets.parse(plan.new, name)
            choice = await self._deployer.choose(model, version)
            latest = choice._replace(versions=choice.versions[-1:], fallback_versions=(), is_added_to_others=True)
            if (model, *latest.versions) == (old.model, old.version):
                raise _make_already_serves_error(old, name)

            def record_of(block_id: str) -> RolloutRecord:
                rolled = RolledBlock(block_id=block_id, model=model, version=latest.versions[0])
                return RolloutRecord(plan=plan, old=old, new=rolled, began=time.time(), has_deployed=True)

            # The block and the record are written in one commit. If this manager died between two commits, the block
            # would answer for its model's name without a rollout.
            (block_id,) = await self._deployer.deploy(latest, lambda block_ids: [_write(record_of(block_ids[0]))])
            record = record_of(block_id)
        self._rollouts[name] = Rollout(record, now())
        self._record_event("rollout_started", name, f"rollout started from {old} to {record.new}")
        self._publish_routes(self._control.term)
        await self._write()
        await self._control.notify()
        self._is_due.set()

    def _find_old_block(self, plan: RolloutPlan) -> RolledBlock:
        """Return the block that `--from` names, or otherwise the block that serves the name now."""
        known = self._rollouts.get(plan.name)
        if plan.old:
            block = self._targets.find_deployed(plan.old, plan.name)
            if block is None:
                raise UnknownModel(f"'{plan.old}' is not deployed; choose a deployed block as the old one (--from)")
            return RolledBlock.from_desired_block(block)
        if known is not None:
            return known.record.new if known.record.phase is RolloutPhase.DONE else known.record.old
        block = self._targets.find_newest(plan.name)
        if block is None:
            raise UnknownModel(
                f"no deployed model is named '{plan.name}'; deploy the model first, or name the old block (--from)"
            )
        return RolledBlock.from_desired_block(block)

    # --- events and actions

    def get_revision(self, name: str) -> int:
        """Return the revision of the record's last write."""
        return self._control.desired.revisions.get(ROLLOUTS + name, 0)

    def _check_unchanged(self, name: str, expected: str) -> None:
        """Raise if the record no longer has the ETag `expected`.

        No other process writes rollouts during this term, so the check stays valid until the change is written.
        """
        with require_etag(expected, ROLLOUTS + name, self._control.desired.revisions):
            pass

    async def _request_change(self, name: str, event: RolloutEvent, expected: str = "") -> None:
        async with self._changing:
            self._control.check_leads()
            self._find(name)
            self._check_unchanged(name, expected)
            self._handle(name, event)
            await self._write()
            await self._control.notify()

    def _handle(self, name: str, event: RolloutEvent) -> None:
        rollout = self._rollouts[name]
        actions = rollout.handle(event, now())
        for action in actions:
            self._perform(name, rollout, action)
        if actions:
            self._publish_routes(self._control.term)

    def _perform(self, name: str, rollout: Rollout, action: RolloutAction) -> None:
        match action:
            case RolloutChanged(kind, text):
                self._unwritten.add(name)
                self._is_due.set()
                self._record_event(kind, name, text)
            case ReleaseBlock(block):
                is_old = block.block_id == rollout.record.old.block_id
                self._released.append((block, BlockRole.SPARE if is_old else BlockRole.WITHDRAWN))
                self._is_due.set()

    def _record_event(self, kind: str, name: str, text: str) -> None:
        self._drafts.append(EventDraft(kind, name, text))
        self._metrics.record_change(name, kind.removeprefix("rollout_"), self._rollouts[name].record.weight)

    def _publish_routes(self, term: Term) -> None:
        gateways = len(self._control.desired.gateways.gateways)
        routes = [rollout.make_route(gateways) for rollout in self._rollouts.values()]
        term.set_routes([route for route in routes if route is not None])

    async def _run_once(self) -> None:
        await wait_at_most(self._is_due, TICK_S)
        self._is_due.clear()
        if not self._control.epoch:
            return
        try:
            await self._tick()
        except PenstockError as error:
            log.warning("writing_rollouts_failed", error=error.message)
            await asyncio.sleep(RETRY_S)

    async def _tick(self) -> None:
        for name, rollout in list(self._rollouts.items()):
            for block_id in (rollout.record.new.block_id, rollout.record.old.block_id):
                if not rollout.record.is_over:
                    self._handle(name, BlockSeen(block_id, *self._targets.find_state(block_id)))
            self._handle(name, RolloutSignal.TICK)
        await self._control.notify()
        await self._write()

    async def _write(self) -> None:
        async with self._writing:
            names, self._unwritten = self._unwritten & self._rollouts.keys(), set()
            drafts, self._drafts = self._drafts, []
            try:
                await self._control.events.commit([_write(self._rollouts[name].record) for name in names], drafts)
            except PenstockError:
                self._unwritten |= names
                self._drafts = [*drafts, *self._drafts]
                raise
            while self._released:
                released = self._released.pop(0)
                try:
                    await self._release(*released)
                except PenstockError:
                    self._released.insert(0, released)
                    raise

    async def _release(self, block: RolledBlock, role: BlockRole) -> None:
        if block.block_id in self._control.desired.blocks and not self._is_needed(block.block_id):
            await self._deployer.change_block(block.block_id, role=role)

    async def _remove(self, name: str) -> None:
        await self._control.commit([Write(ROLLOUTS + name, None)])
        self._rollouts.pop(name, None)
        self._metrics.forget(name)
        self._publish_routes(self._control.term)
        await self._control.notify()

    # --- reading

    def _read_records(self) -> None:
        self._rollouts = {}
        for key, value in self._control.desired.others.items():
            if not key.startswith(ROLLOUTS):
                continue
            try:
                record = RolloutRecord.model_validate_json(value)
            except ValidationError as error:  # written by another version of Penstock
                log.warning("rollout_record_skipped", key=key, error=str(error))
                continue
            self._rollouts[record.plan.name] = Rollout(record, now())

    def _find(self, name: str) -> Rollout:
        visible = self._find_visible()
        if name not in visible:
            raise NotFound(f"there is no rollout of '{name}'; existing rollouts: {', '.join(visible) or 'none'}")
        return visible[name]

    def _find_visible(self) -> dict[str, Rollout]:
        """Return the rollouts whose blocks the caller of the current request may use, by name."""
        return {
            name: rollout
            for name, rollout in sorted(self._rollouts.items())
            if all(may_use(each.model, each.block_id) for each in (rollout.record.old, rollout.record.new))
        }

    def _is_needed(self, block_id: str) -> bool:
        return any(block_id in rollout.record.needed() for rollout in self._rollouts.values())


def _make_already_serves_error(block: RolledBlock, name: str) -> InvalidRequest:
    return InvalidRequest(f"block {block} already serves '{name}': choose another block for the rollout")


def _write(record: RolloutRecord) -> Write:
    return Write(ROLLOUTS + record.plan.name, encode(record))
