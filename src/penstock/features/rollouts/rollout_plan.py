"""The plan of a rollout, as an operator gives it, and the rollout's record in the metadata store."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from penstock.core.blocks import StoredValue
from penstock.core.cluster.routes import BlockShare, NameRoute, Sticky
from penstock.core.settings import Section
from penstock.manager.desired_state import DesiredBlock

ALL = 100.0
Percent = Annotated[float, Field(gt=0, le=ALL)]


class RolloutPlan(Section):
    """A rollout as an operator requests it."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    new: Annotated[str, Field(min_length=1, max_length=256)]  # a version of the model, MODEL:VERSION, or a block id
    old: Annotated[str, Field(max_length=256)] = (
        ""  # in the same notation; empty: the block that answers for the name now
    )
    steps: tuple[Percent, ...] = (5.0, 25.0, 50.0, 100.0)  # shares of the new block; the last one stays if below 100
    hold_s: Annotated[float, Field(ge=0, le=604_800)] = 60.0  # minimum duration of each step
    min_answers: Annotated[int, Field(ge=0, le=1_000_000)] = 50  # minimum answers of the new block in each step
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.02  # excess over the old block's; 1: errors are ignored
    max_slowdown: Annotated[float, Field(ge=0, le=1000)] = 1.5  # multiple of the old latency; 0: latency is ignored
    sticky: Sticky = "none"
    key: Annotated[str, Field(max_length=256)] = ""
    shadow: Annotated[float, Field(ge=0, le=ALL)] = 0.0  # percent of requests to copy before the first step
    is_compared: bool = False  # compare the copies' outputs with the answers that clients got
    keep_s: Annotated[float, Field(ge=0, le=604_800)] = 600.0  # how long the old block stays, for sessions and undo

    @model_validator(mode="after")
    def _check_fields(self) -> "RolloutPlan":
        if list(self.steps) != sorted(set(self.steps)):
            raise ValueError("steps must increase, for example 5, 25, 50, 100")
        if not self.steps and not self.shadow:
            raise ValueError("the plan has neither steps nor a shadow; set at least one of them")
        if (self.sticky == "key") != bool(self.key):
            raise ValueError("set `key` to the name of a request parameter if `sticky` is 'key', and only then")
        return self


class RolloutPhase(StrEnum):
    WAITING = "waiting"  # until the new block is ready
    SHADOWING = "shadowing"  # the new block gets copies of requests
    RUNNING = "running"
    HOLDING = "holding"  # at the last step, which is below 100%
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
    def from_desired_block(cls, block: DesiredBlock) -> "RolledBlock":
        return cls(block_id=block.block_id, model=block.record.model, version=block.record.version)

    def __str__(self) -> str:
        return f"{self.model}:{self.version}"


class RolloutRecord(StoredValue):
    """A rollout in the metadata store."""

    plan: RolloutPlan
    old: RolledBlock
    new: RolledBlock
    began: float  # seconds since 1970
    phase: RolloutPhase = RolloutPhase.WAITING
    is_paused: bool = False
    step: int = 0
    reason: str = ""  # why it is in this phase
    answers: int = 0  # from the new block to clients, failures included, at the time of the write
    has_deployed: bool = False  # the rollout deployed the new block
    is_old_gone: bool = False

    @property
    def is_over(self) -> bool:
        return self.phase in OVER

    @property
    def is_past(self) -> bool:
        """Return whether the rollout is done and its record has no effect any more.

        The record of a rollout to an older version stays in effect; otherwise the newest version would serve the name.
        """
        is_back = self.old.model == self.new.model and int(self.new.version) < int(self.old.version)
        return self.phase is RolloutPhase.DONE and self.is_old_gone and not is_back

    @property
    def weight(self) -> float:
        """Return the new block's share in percent."""
        if self.phase is RolloutPhase.DONE:
            return ALL
        is_answering = self.phase in (RolloutPhase.RUNNING, RolloutPhase.HOLDING)
        return self.plan.steps[self.step] if is_answering else 0.0

    def needed(self) -> set[str]:
        """Return the ids of the blocks that must stay deployed for the rollout."""
        if self.phase is RolloutPhase.DONE:
            return {self.new.block_id}
        return {self.old.block_id} if self.is_over else {self.old.block_id, self.new.block_id}

    def make_route(self, allowance: int = 0, token: str = "") -> NameRoute | None:
        """Return the route of the name, or None if the name needs none.

        `allowance` limits the new block's requests per gateway; gateways count from 0 again when `token` changes.
        """
        plan, old, new = self.plan, self.old.block_id, self.new.block_id
        if self.phase is RolloutPhase.DONE and self.is_old_gone and self._needs_no_route():
            return None
        shares = [BlockShare(old, ALL - self.weight)]
        if self.weight:
            shares.append(BlockShare(new, self.weight))
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

    def _needs_no_route(self) -> bool:
        """Return whether the new block answers for the name even without a route, as the model's newest version."""
        is_same_model = self.old.model == self.new.model == self.plan.name
        return is_same_model and int(self.new.version) > int(self.old.version)
