"""A rollout: a name moves from one block to another in steps, and back at the first fault. Decides; never acts."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil, inf
from typing import Any, TypeAlias

from penstock.core.blocks import BlockState
from penstock.core.cluster.answer_counts import AnswerCounts
from penstock.core.errors import InvalidRequest
from penstock.core.routes import NameRoute
from penstock.manager.rollouts.evidence import DOUBT, LEAST_LATENCIES, Evidence, Sample, Tolerance
from penstock.manager.rollouts.plan import ALL, RolledBlock, RolloutPhase, RolloutRecord

# What a block may be given beyond what it has answered well; then as much again as it has.
TRIAL = 40
DOUBTED = 10  # and while it is in doubt, no more than this


# --- events


@dataclass(frozen=True, slots=True)
class CountsHeard:
    gateway: str
    counts: Sequence[AnswerCounts]


@dataclass(frozen=True, slots=True)
class GatewayGone:
    gateway: str


@dataclass(frozen=True, slots=True)
class BlockSeen:
    block_id: str
    state: BlockState
    reason: str


class RolloutSignal(Enum):
    """Events that say nothing more."""

    TICK = "tick"
    PAUSE = "pause"  # this and the others an operator asks for
    RESUME = "resume"
    UNDO = "undo"


RolloutEvent: TypeAlias = CountsHeard | GatewayGone | BlockSeen | RolloutSignal

# --- actions


@dataclass(frozen=True, slots=True)
class RolloutChanged:
    """The record is another: it is to be written, its route told, and people too."""

    kind: str  # an event's: rollout_step, rollout_rolled_back, …
    text: str


@dataclass(frozen=True, slots=True)
class RouteChanged:
    """Only how much the new block may be given is another."""


@dataclass(frozen=True, slots=True)
class LetGo:
    """The rollout has no more use for the block."""

    block: RolledBlock


RolloutAction: TypeAlias = RolloutChanged | RouteChanged | LetGo


class Rollout:
    """One of them, while a manager leads. What it has seen is forgotten with the manager: a step then begins anew."""

    def __init__(self, record: RolloutRecord, now: float) -> None:
        self.record = record
        self._evidence = Evidence(record.old.block_id, record.new.block_id)
        self.answers = record.answers  # that clients got from the new block, failures included
        self._has_stepped = bool(record.weight or record.answers)
        self._step_at = now
        self._over_at = now if record.is_over else inf
        self._allowance = self._proved = 0
        self._is_doubted = False
        self._token = f"{record.began} {now}"  # gateways count anew for a manager that has seen nothing yet
        plan = record.plan
        self._tolerance = Tolerance(plan.max_error_rate, plan.max_slowdown, plan.sticky != "none")
        self._evidence.begin_step(record.weight / ALL, now)

    def handle(self, event: RolloutEvent, now: float) -> list[RolloutAction]:
        """Raises InvalidRequest for what cannot be asked of it now."""
        if event is RolloutSignal.PAUSE:
            return self._pause()
        if event is RolloutSignal.RESUME:
            return self._resume(now)
        if event is RolloutSignal.UNDO:
            return self._undo(now)
        if isinstance(event, CountsHeard):
            self._count(event)
        if self.record.is_over:
            return self._let_old_go(now)
        if isinstance(event, BlockSeen):
            return self._see(event, now)
        if isinstance(event, GatewayGone):
            self._evidence.gateway_left(event.gateway)
            return []
        if isinstance(event, CountsHeard):
            self._evidence.add(event.gateway, event.counts, now)
            return self._judge(now) or self._advance(now) or self._grant(now)
        return self._judge(now) or self._advance(now)

    def _count(self, heard: CountsHeard) -> None:
        if self._has_stepped:  # else they are of copies
            its = [each for each in heard.counts if each.block_id == self.record.new.block_id and not each.is_control]
            self.answers += sum(each.outcomes for each in its)

    def seen(self) -> tuple[Sample, Sample]:
        """What was counted of the old block and of the new one, since the rollout began or this manager leads."""
        return self._evidence.old, self._evidence.new

    @property
    def missing(self) -> int:
        """Answers by the new block before its step may end."""
        return max(0, self.record.plan.min_answers - self._evidence.step_answers)

    def left_s(self, now: float) -> float:
        """Before its step may end."""
        return max(0.0, self._step_at + self.record.plan.hold_s - now)

    def route(self, gateways: int = 1) -> NameRoute | None:
        """As each of so many gateways is to have it."""
        return self.record.route(self._allowance or ceil(TRIAL / max(1, gateways)), self._token)

    # --- what operators ask

    def _pause(self) -> list[RolloutAction]:
        self._check_goes_on("paused")
        if self.record.is_paused:
            return []
        return self._change("paused", f"paused at {self.record.weight:g}%", is_paused=True)

    def _resume(self, now: float) -> list[RolloutAction]:
        self._check_goes_on("resumed")
        record = self.record
        if record.is_paused:
            self._begin_step(now)
            return self._change("resumed", f"goes on at {record.weight:g}%", is_paused=False)
        if record.phase is RolloutPhase.HOLDING:
            return self._finish(now, "resumed beyond its last step")
        return []

    def _undo(self, now: float) -> list[RolloutAction]:
        record = self.record
        if record.is_over and (record.phase is not RolloutPhase.DONE or record.is_old_gone):
            raise InvalidRequest(
                f"the rollout of '{record.plan.name}' is {record.phase}: there is nothing to undo. Start one to "
                "the block that should answer"
            )
        return self._end(RolloutPhase.UNDONE, "undone", "an operator undid it", now)

    def _check_goes_on(self, what: str) -> None:
        if self.record.is_over:
            name, phase = self.record.plan.name, self.record.phase
            raise InvalidRequest(f"the rollout of '{name}' is {phase}: it cannot be {what}. Start another")

    # --- what happens

    def _see(self, seen: BlockSeen, now: float) -> list[RolloutAction]:
        record = self.record
        is_gone = seen.state in (BlockState.FAILED, BlockState.UNLOADED)
        if seen.block_id == record.old.block_id and seen.state is BlockState.UNLOADED:
            return self._end(RolloutPhase.FAILED, "failed", f"the old block ({record.old}) was unloaded", now)
        if seen.block_id != record.new.block_id:
            return []
        if is_gone:
            reason = seen.reason or str(seen.state)
            if record.phase is RolloutPhase.WAITING:
                return self._end(
                    RolloutPhase.FAILED, "failed", f"the new block ({record.new}) did not load: {reason}", now
                )
            return self._roll_back(f"the new block is {seen.state}: {reason}", now)
        if record.phase is RolloutPhase.WAITING and seen.state is not BlockState.LOADING:
            return self._start(now)
        return []

    def _start(self, now: float) -> list[RolloutAction]:
        self._begin_step(now)
        plan = self.record.plan
        if plan.shadow:
            text = f"{self.record.new} gets copies of {plan.shadow:g}% of the requests"
            return self._change("shadowing", text, phase=RolloutPhase.SHADOWING)
        return self._step(0, now)

    def _judge(self, now: float) -> list[RolloutAction]:
        if self.record.phase is RolloutPhase.WAITING:
            return []
        fault = self._evidence.fault(self._tolerance, now)
        return self._roll_back(fault, now) if fault else []

    def _advance(self, now: float) -> list[RolloutAction]:
        record = self.record
        is_moving = record.phase in (RolloutPhase.SHADOWING, RolloutPhase.RUNNING) and not record.is_paused
        if not is_moving or self.left_s(now) or self.missing or self._may_fail(now):
            return []
        if record.phase is RolloutPhase.SHADOWING:
            return self._step(0, now) if record.plan.steps else []
        if record.step + 1 < len(record.plan.steps):
            return self._step(record.step + 1, now)
        if record.weight < ALL:
            return self._change("holding", f"stays at {record.weight:g}%, its last step", phase=RolloutPhase.HOLDING)
        return self._finish(now, "all its steps are done")

    def _may_fail(self, now: float) -> bool:
        """While its failures are in doubt, it gets no larger share."""
        return bool(self._evidence.error_fault(self._tolerance, now, DOUBT))

    def _step(self, step: int, now: float) -> list[RolloutAction]:
        share = self.record.plan.steps[step]
        text = f"{self.record.new} answers {share:g}%, {self.record.old} the rest"
        self._has_stepped = True
        actions = self._change("step", text, phase=RolloutPhase.RUNNING, step=step)
        self._begin_step(now)
        return actions

    def _begin_step(self, now: float) -> None:
        self._step_at = now
        self._evidence.begin_step(self.record.weight / ALL, now)

    def _grant(self, now: float) -> list[RolloutAction]:
        """What it has answered well lets it be given more, but little while that is in doubt."""
        seen, gateways = self._evidence.new.outcomes, self._evidence.gateways
        if self.record.phase is not RolloutPhase.RUNNING or seen < LEAST_LATENCIES:
            return []
        was_doubted, self._is_doubted = self._is_doubted, bool(self._evidence.fault(self._tolerance, now, DOUBT))
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

    def _roll_back(self, fault: str, now: float) -> list[RolloutAction]:
        return self._end(RolloutPhase.ROLLED_BACK, "rolled_back", fault, now)

    def _finish(self, now: float, why: str) -> list[RolloutAction]:
        self._over_at = now
        text = f"{self.record.new} answers for '{self.record.plan.name}': {why}"
        return [*self._change("done", text, phase=RolloutPhase.DONE, is_paused=False), *self._let_old_go(now)]

    def _end(self, phase: RolloutPhase, kind: str, reason: str, now: float) -> list[RolloutAction]:
        """The old block answers."""
        self._over_at = now
        text = f"{self.record.old} answers for '{self.record.plan.name}': {reason}"
        actions = self._change(kind, text, phase=phase, is_paused=False, reason=reason)
        return [*actions, LetGo(self.record.new)] if self.record.has_deployed else actions

    def _let_old_go(self, now: float) -> list[RolloutAction]:
        record = self.record
        is_due = (
            record.phase is RolloutPhase.DONE and not record.is_old_gone and now - self._over_at >= record.plan.keep_s
        )
        if not is_due:
            return []
        self.record = record.model_copy(update={"is_old_gone": True})
        text = f"{record.old} is no longer kept"
        changed = RolloutChanged("rollout_old_let_go", text)
        return [changed, LetGo(record.old)] if record.old.model == record.new.model else [changed]

    def _change(self, kind: str, text: str, **fields: Any) -> list[RolloutAction]:
        """`fields`: of the record, those that are others."""
        self.record = self.record.model_copy(update={"reason": "", "answers": self.answers, **fields})
        return [RolloutChanged(f"rollout_{kind}", text)]
