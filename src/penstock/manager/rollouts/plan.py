"""What an operator asks of a rollout, and what lies of it in the store."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from penstock.core.blocks import StoredValue
from penstock.core.routes import NameRoute, Share, Sticky
from penstock.core.settings import Section
from penstock.manager.desired import DesiredBlock

ALL = 100.0
Percent = Annotated[float, Field(gt=0, le=ALL)]


class RolloutPlan(Section):
    """What an operator asks for."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    new: Annotated[str, Field(min_length=1, max_length=256)]  # a version of the model, MODEL:VERSION, or a block's id
    old: Annotated[str, Field(max_length=256)] = ""  # the same; empty: what answers for the name now
    steps: tuple[Percent, ...] = (5.0, 25.0, 50.0, 100.0)  # the new block's share; below 100 at the end: it stays so
    hold_s: Annotated[float, Field(ge=0, le=604_800)] = 60.0  # of each step
    min_answers: Annotated[int, Field(ge=0, le=1_000_000)] = 50  # by the new block in each step
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.02  # above the old block's; 1: errors do not matter
    max_slowdown: Annotated[float, Field(ge=0, le=1000)] = 1.5  # times the old block's latency; 0: it does not matter
    sticky: Sticky = "none"
    key: Annotated[str, Field(max_length=256)] = ""
    shadow: Annotated[float, Field(ge=0, le=ALL)] = 0.0  # percent of requests that are copied, before the first step
    is_compared: bool = False  # the shadow's outputs, with those that were given
    keep_s: Annotated[float, Field(ge=0, le=604_800)] = 600.0  # the old block stays so long, for its sessions and undo

    @model_validator(mode="after")
    def _fits_together(self) -> "RolloutPlan":
        if list(self.steps) != sorted(set(self.steps)):
            raise ValueError("steps must rise, like 5, 25, 50, 100")
        if not self.steps and not self.shadow:
            raise ValueError("there is nothing to do: give steps, or a shadow")
        if (self.sticky == "key") != bool(self.key):
            raise ValueError("sticky 'key' and the request parameter that is the key belong together")
        return self


class RolloutPhase(StrEnum):
    WAITING = "waiting"  # for the new block to be ready
    SHADOWING = "shadowing"  # it gets copies
    RUNNING = "running"
    HOLDING = "holding"  # the last step is reached, and is not all
    DONE = "done"
    ROLLED_BACK = "rolled back"
    UNDONE = "undone"
    FAILED = "failed"  # the new block never served


OVER = (RolloutPhase.DONE, RolloutPhase.ROLLED_BACK, RolloutPhase.UNDONE, RolloutPhase.FAILED)


class RolledBlock(StoredValue):
    block_id: str
    model: str
    version: str

    @classmethod
    def of(cls, block: DesiredBlock) -> "RolledBlock":
        return cls(block_id=block.block_id, model=block.record.model, version=block.record.version)

    def __str__(self) -> str:
        return f"{self.model}:{self.version}"


class RolloutRecord(StoredValue):
    """What lies in the store of a rollout."""

    plan: RolloutPlan
    old: RolledBlock
    new: RolledBlock
    began: float  # seconds since 1970
    phase: RolloutPhase = RolloutPhase.WAITING
    is_paused: bool = False
    step: int = 0
    reason: str = ""  # why it is in this phase
    answers: int = 0  # that clients got from the new block, failures included, when this was written
    has_deployed: bool = False  # the new block is there for this rollout alone
    is_old_gone: bool = False

    @property
    def is_over(self) -> bool:
        return self.phase in OVER

    @property
    def is_past(self) -> bool:
        """It is done, its old block is gone, and it did not go back to an older version, which is to stay."""
        is_back = self.old.model == self.new.model and int(self.new.version) < int(self.old.version)
        return self.phase is RolloutPhase.DONE and self.is_old_gone and not is_back

    @property
    def weight(self) -> float:
        """The new block's share, in percent."""
        if self.phase is RolloutPhase.DONE:
            return ALL
        is_answering = self.phase in (RolloutPhase.RUNNING, RolloutPhase.HOLDING)
        return self.plan.steps[self.step] if is_answering else 0.0

    def needed(self) -> set[str]:
        """The blocks that must stay for it."""
        if self.phase is RolloutPhase.DONE:
            return {self.new.block_id}
        return {self.old.block_id} if self.is_over else {self.old.block_id, self.new.block_id}

    def route(self, allowance: int = 0, token: str = "") -> NameRoute | None:
        """What it makes of its name; None: what the name is without it. `token` names what the allowance is for."""
        plan, old, new = self.plan, self.old.block_id, self.new.block_id
        if self.phase is RolloutPhase.DONE and self.is_old_gone and self._is_plain():
            return None
        shares = [Share(old, ALL - self.weight)]
        if self.weight:
            shares.append(Share(new, self.weight))
        is_shadowing = self.phase is RolloutPhase.SHADOWING
        is_trial = self.phase is RolloutPhase.RUNNING
        return NameRoute(
            plan.name,
            tuple(shares[1:] if self.is_old_gone else shares),
            plan.sticky,
            plan.key,
            shadow=new if is_shadowing else "",
            shadow_share=plan.shadow / ALL if is_shadowing else 0.0,
            is_compared=is_shadowing and plan.is_compared,
            trial=new if is_trial else "",
            allowance=allowance if is_trial else 0,
            began=token if is_trial else "",
        )

    def _is_plain(self) -> bool:
        """The newest version answers for its model's name in any case."""
        is_same_model = self.old.model == self.new.model == self.plan.name
        return is_same_model and int(self.new.version) > int(self.old.version)
