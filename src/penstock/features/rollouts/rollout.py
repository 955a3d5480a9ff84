"""A rollout: moves a name from one block to another in steps, and back at the first fault. Pure: no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil, inf
from typing import Any, TypeAlias

from penstock.core.blocks import BlockState
from penstock.core.cluster.answer_counts import AnswerCounts
from penstock.core.cluster.routes import NameRoute
from penstock.core.errors import InvalidRequest
from penstock.features.rollouts.evidence import DOUBT, MIN_LATENCIES, Evidence, Sample, Tolerance
from penstock.features.rollouts.rollout_plan import ALL, RolledBlock, RolloutPhase, RolloutRecord

# Requests that the new block may get before it has answered any; later, twice the number of its answers is added.
TRIAL = 40
DOUBTED = 10  # additional requests while the new block is in doubt


# --- events


@dataclass(frozen=True, slots=True)
class CountsReported:
    gateway: str
    counts: Sequence[AnswerCounts]


@dataclass(frozen=True, slots=True)
class GatewayLeft:
    gateway: str


@dataclass(frozen=True, slots=True)
class BlockSeen:
    block_id: str
    state: BlockState
    reason: str


class RolloutSignal(Enum):
    """Events without data. All events except `TICK` are requests of an operator."""

    TICK = "tick"
    PAUSE = "pause"
    RESUME = "resume"
    UNDO = "undo"


RolloutEvent: TypeAlias = CountsReported | GatewayLeft | BlockSeen | RolloutSignal

# --- actions


@dataclass(frozen=True, slots=True)
class RolloutChanged:
    """The record changed: write it, publish the route, and emit an event."""

    kind: str  # of the event: rollout_step, rollout_rolled_back, …
    text: str


@dataclass(frozen=True, slots=True)
class RouteChanged:
    """The new block's allowance changed: publish the route."""


@dataclass(frozen=True, slots=True)
class ReleaseBlock:
    """The rollout no longer needs the block."""

    block: RolledBlock


RolloutAction: TypeAlias = RolloutChanged | RouteChanged | ReleaseBlock


class Rollout:
    """A rollout during one manager's term. Its evidence is not stored; the next leader repeats the current step."""

    def __init__(self, record: RolloutRecord, now: float) -> None:
        self.record = record
        self._evidence = Evidence(record.old.block_id, record.new.block_id)
        self.answers = record.answers  # from the new block to clients, failures included
        self._has_stepped = bool(record.weight or record.answers)
        self._step_at = now
        self._over_at = now if record.is_over else inf
        self._allowance = self._proved = 0
        self._is_doubted = False
        self._token = f"{record.began} {now}"  # a new token makes gateways count the allowance from 0
        plan = record.plan
        self._tolerance = Tolerance(plan.max_error_rate, plan.max_slowdown, plan.sticky != "none")
        self._evidence.begin_step(record.weight / ALL, now)

    def handle(self, event: RolloutEvent, now: float) -> list[RolloutAction]:
        """Return the actions for the event; raise InvalidRequest if an operator's request is not possible."""
        if event is RolloutSignal.PAUSE:
            return self._pause()
        if event is RolloutSignal.RESUME:
            return self._resume(now)
        if event is RolloutSignal.UNDO:
            return self._undo()
        if isinstance(event, CountsReported):
            self._count_answers(event)
        if self.record.is_over:
            return self._release_old(now)
        if isinstance(event, BlockSeen):
            return self._handle_block_seen(event, now)
        if isinstance(event, GatewayLeft):
            self._evidence.gateway_left(event.gateway)
            return []
        if isinstance(event, CountsReported):
            self._evidence.add(event.gateway, event.counts, now)
            return self._roll_back_if_worse(now) or self._advance(now) or self._raise_allowance(now)
        return self._roll_back_if_worse(now) or self._advance(now)

    def _count_answers(self, report: CountsReported) -> None:
        if self._has_stepped:  # before the first step, the counts are about shadow copies
            new_id = self.record.new.block_id
            counts = [each for each in report.counts if each.block_id == new_id and not each.is_control]
            self.answers += sum(each.outcomes for each in counts)

    def get_outcomes(self) -> tuple[Sample, Sample]:
        """Return the outcomes of the old and the new block since the rollout or this manager's term started."""
        return self._evidence.old, self._evidence.new

    @property
    def count_missing_answers(self) -> int:
        """Return how many more answers the new block needs before the step may end."""
        return max(0, self.record.plan.min_answers - self._evidence.step_answers)

    def compute_left_s(self, now: float) -> float:
        """Return the seconds before the step may end."""
        return max(0.0, self._step_at + self.record.plan.hold_s - now)

    def make_route(self, gateways: int = 1) -> NameRoute | None:
        """Return the route for each gateway. `gateways` is their number."""
        return self.record.make_route(self._allowance or ceil(TRIAL / max(1, gateways)), self._token)

    # --- requests of operators

    def _pause(self) -> list[RolloutAction]:
        self._check_not_over("paused")
        if self.record.is_paused:
            return []
        return self._change_record("paused", f"paused at {self.record.weight:g}%", is_paused=True)

    def _resume(self, now: float) -> list[RolloutAction]:
        self._check_not_over("resumed")
        record = self.record
        if record.is_paused:
            self._begin_step(now)
            return self._change_record("resumed", f"resumed at {record.weight:g}%", is_paused=False)
        if record.phase is RolloutPhase.HOLDING:
            return self._finish(now, "an operator resumed the rollout after its last step")
        return []

    def _undo(self) -> list[RolloutAction]:
        record = self.record
        if record.is_over and (record.phase is not RolloutPhase.DONE or record.is_old_gone):
            raise InvalidRequest(
                f"the rollout of '{record.plan.name}' is {record.phase}: there is nothing to undo; start a rollout to "
                "the block that should answer"
            )
        return self._return_to_old_block(RolloutPhase.UNDONE, "undone", "undone by an operator")

    def _check_not_over(self, change: str) -> None:
        if self.record.is_over:
            name, phase = self.record.plan.name, self.record.phase
            raise InvalidRequest(f"the rollout of '{name}' is {phase} and cannot be {change}; start a new rollout")

    # --- progress

    def _handle_block_seen(self, seen: BlockSeen, now: float) -> list[RolloutAction]:
        record = self.record
        is_gone = seen.state in (BlockState.FAILED, BlockState.UNLOADED)
        if seen.block_id == record.old.block_id and seen.state is BlockState.UNLOADED:
            return self._return_to_old_block(
                RolloutPhase.FAILED, "failed", f"the old block ({record.old}) was unloaded"
            )
        if seen.block_id != record.new.block_id:
            return []
        if is_gone:
            reason = seen.reason or str(seen.state)
            if record.phase is RolloutPhase.WAITING:
                return self._return_to_old_block(
                    RolloutPhase.FAILED, "failed", f"the new block ({record.new}) did not load: {reason}"
                )
            return self._roll_back(f"the new block is {seen.state}: {reason}")
        if record.phase is RolloutPhase.WAITING and seen.state is not BlockState.LOADING:
            return self._start(now)
        return []

    def _start(self, now: float) -> list[RolloutAction]:
        self._begin_step(now)
        plan = self.record.plan
        if plan.shadow:
            text = f"copying {plan.shadow:g}% of the requests to {self.record.new}"
            return self._change_record("shadowing", text, phase=RolloutPhase.SHADOWING)
        return self._go_to_step(0, now)

    def _roll_back_if_worse(self, now: float) -> list[RolloutAction]:
        if self.record.phase is RolloutPhase.WAITING:
            return []
        fault = self._evidence.find_fault(self._tolerance, now)
        return self._roll_back(fault) if fault else []

    def _advance(self, now: float) -> list[RolloutAction]:
        record = self.record
        is_moving = record.phase in (RolloutPhase.SHADOWING, RolloutPhase.RUNNING) and not record.is_paused
        if not is_moving or self.compute_left_s(now) or self.count_missing_answers or self._may_fail(now):
            return []
        if record.phase is RolloutPhase.SHADOWING:
            return self._go_to_step(0, now) if record.plan.steps else []
        if record.step + 1 < len(record.plan.steps):
            return self._go_to_step(record.step + 1, now)
        if record.weight < ALL:
            text = f"holding at {record.weight:g}%, the last step"
            return self._change_record("holding", text, phase=RolloutPhase.HOLDING)
        return self._finish(now, "all steps completed")

    def _may_fail(self, now: float) -> bool:
        """Return whether the new block's error rate is in doubt, so that its share must not grow."""
        return bool(self._evidence.find_error_fault(self._tolerance, now, DOUBT))

    def _go_to_step(self, step: int, now: float) -> list[RolloutAction]:
        share = self.record.plan.steps[step]
        text = f"{share:g}% of the requests go to {self.record.new}, the rest to {self.record.old}"
        self._has_stepped = True
        actions = self._change_record("step", text, phase=RolloutPhase.RUNNING, step=step)
        self._begin_step(now)
        return actions

    def _begin_step(self, now: float) -> None:
        self._step_at = now
        self._evidence.begin_step(self.record.weight / ALL, now)

    def _raise_allowance(self, now: float) -> list[RolloutAction]:
        """Raise the new block's allowance with its outcomes, but only a little while its error rate is in doubt."""
        seen, gateways = self._evidence.new.outcomes, self._evidence.gateways
        if self.record.phase is not RolloutPhase.RUNNING or seen < MIN_LATENCIES:
            return []
        was_doubted, self._is_doubted = self._is_doubted, bool(self._evidence.find_fault(self._tolerance, now, DOUBT))
        if self._is_doubted:
            allowance = self._evidence.most_outcomes + ceil(DOUBTED / gateways)
        elif seen < 1.25 * self._proved and not was_doubted:
            return []
        else:
            self._proved, allowance = seen, ceil(TRIAL / gateways) + 2 * seen
        if allowance == self._allowance:
            return []
        self._allowance = allowance
        return [RouteChanged()]

    def _roll_back(self, fault: str) -> list[RolloutAction]:
        return self._return_to_old_block(RolloutPhase.ROLLED_BACK, "rolled_back", fault)

    def _finish(self, now: float, reason: str) -> list[RolloutAction]:
        self._over_at = now
        text = f"{self.record.new} answers all requests for '{self.record.plan.name}': {reason}"
        return [*self._change_record("done", text, phase=RolloutPhase.DONE), *self._release_old(now)]

    def _return_to_old_block(self, phase: RolloutPhase, kind: str, reason: str) -> list[RolloutAction]:
        """End the rollout: send all requests to the old block again."""
        text = f"{self.record.old} answers all requests for '{self.record.plan.name}': {reason}"
        actions = self._change_record(kind, text, phase=phase, is_paused=False, reason=reason)
        return [*actions, ReleaseBlock(self.record.new)] if self.record.has_deployed else actions

    def _release_old(self, now: float) -> list[RolloutAction]:
        record = self.record
        is_due = (
            record.phase is RolloutPhase.DONE and not record.is_old_gone and now - self._over_at >= record.plan.keep_s
        )
        if not is_due:
            return []
        self.record = record.model_copy(update={"is_old_gone": True})
        text = f"{record.old} is no longer kept for undo"
        changed = RolloutChanged("rollout_old_let_go", text)
        return [changed, ReleaseBlock(record.old)] if record.old.model == record.new.model else [changed]

    def _change_record(self, kind: str, text: str, **fields: Any) -> list[RolloutAction]:
        """Set fields of the record, and return the action for the change."""
        self.record = self.record.model_copy(update={"reason": "", "answers": self.answers, **fields})
        return [RolloutChanged(f"rollout_{kind}", text)]
