"""Readiness of a gateway, and detection of stuck blocks. Pure: no I/O.

A gateway becomes ready when each of the first models is loaded or has failed, and stays ready until it drains. It is
unready while a block that has served before answers no requests: no worker has the block, or the block is stuck.
A block is stuck if requests wait or time out, none was answered for a while, and probes get no answer either.
A block that is being reloaded, was replaced by another version, or never loaded does not make the gateway unready,
unless no model could be loaded at all.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.core.blocks import SERVABLE, BlockState, BlockView
from penstock.router.slots import BlockActivity

MIN_UNANSWERED_S = 10.0  # a block may be stuck after this time without an answer to any of its requests
SLOWEST_FACTOR = 2.0  # a block may be stuck only after this multiple of its slowest answer's time
PROBE_S = 2.0  # workers must answer a probe within this time; probes are sent twice as often
RECOVERY_S = 30.0  # after this time without requests, a stuck block counts as working again


@dataclass(slots=True)
class _Watch:
    """The progress of one block's requests."""

    updated_at: float
    last_answer_at: float
    unanswered: int  # the block's total at `last_answer_at`
    stuck_for_s: float = 0.0  # time since `last_answer_at` in which requests waited or ran
    idle_for_s: float = 0.0
    slowest_s: float = 0.0
    next_probe: float = 0.0
    is_stuck: bool = False


class Readiness:
    """Decides whether the gateway is ready and which of its blocks are stuck."""

    def __init__(self) -> None:
        self._has_settled = False
        self._watches: dict[str, _Watch] = {}

    def update(self, activities: Mapping[str, BlockActivity], now: float) -> list[str]:
        """Update the progress of the blocks, and return the blocks to probe. A block that answers a probe is not stuck.

        Call this a few times per second, with the blocks that are in memory: a block that is being loaded is not stuck.
        """
        self._watches = {block_id: watch for block_id, watch in self._watches.items() if block_id in activities}
        probed: list[str] = []
        for block_id, seen in activities.items():
            watch = self._watches.get(block_id)
            if watch is None:
                watch = self._watches[block_id] = _Watch(now, seen.last_answer_at, seen.unanswered)
            if self._update_watch(watch, seen, now) and watch.next_probe <= now:
                watch.next_probe = now + PROBE_S / 2
                probed.append(block_id)
        return probed

    def is_stuck(self, block_id: str) -> bool:
        watch = self._watches.get(block_id)
        return watch is not None and watch.is_stuck

    def find_problem(self, views: Iterable[BlockView], held_blocks: Collection[str]) -> str:
        """Return why the gateway is not ready, or an empty string. `held_blocks`: the blocks that workers offer."""
        wanted = [view for view in views if view.state is not BlockState.UNLOADED]
        if not self._has_settled:
            awaited = [view for view in wanted if _is_awaited(view, held_blocks)]
            if awaited:
                is_elsewhere = awaited[0].state in SERVABLE
                return f"{_describe(awaited[0])} " + (
                    "has no worker at this gateway yet" if is_elsewhere else "is being loaded"
                )
            self._has_settled = True
        serving = {view.model for view in wanted if view.block_id in held_blocks}
        for view in wanted:
            is_replaced = view.state is BlockState.FAILED and view.model in serving  # another version answers
            if view.has_served and view.block_id not in held_blocks and not is_replaced:
                return f"{_describe(view)} has no worker"
            if view.block_id in held_blocks and self.is_stuck(view.block_id):
                stuck_s = self._watches[view.block_id].stuck_for_s
                return f"{_describe(view)} has not answered any request for {stuck_s:.0f} s"
        has_failed = any(view.state is BlockState.FAILED for view in wanted)
        return "no model could be loaded" if has_failed and not serving else ""

    def _update_watch(self, watch: _Watch, activity: BlockActivity, now: float) -> bool:
        """Update a block's progress, and return whether the block may be stuck."""
        passed_s, watch.updated_at = now - watch.updated_at, now
        if activity.last_answer_at > watch.last_answer_at:
            if activity.unanswered == watch.unanswered:  # otherwise the latency includes requests that timed out
                watch.slowest_s = max(watch.slowest_s, activity.latency_s)
            watch.last_answer_at, watch.unanswered, watch.stuck_for_s = (
                activity.last_answer_at,
                activity.unanswered,
                0.0,
            )
        elif activity.unfinished:
            watch.stuck_for_s += passed_s
            watch.idle_for_s = 0.0
        else:
            watch.idle_for_s += passed_s
            if watch.idle_for_s >= RECOVERY_S:
                watch.stuck_for_s, watch.unanswered = 0.0, activity.unanswered
        # A single long request with none behind it does not make a block suspect.
        is_missed = activity.waiting > 0 or activity.unanswered > watch.unanswered
        limit_s = max(MIN_UNANSWERED_S, SLOWEST_FACTOR * watch.slowest_s)
        is_suspect = is_missed and watch.stuck_for_s >= limit_s
        watch.is_stuck = is_suspect and watch.stuck_for_s >= limit_s + PROBE_S
        return is_suspect


def describe_ready(views: Iterable[BlockView]) -> str:
    """Return a short summary of the models that a ready server serves."""
    wanted = [view for view in views if view.state is not BlockState.UNLOADED]
    if failed := [_describe(view) for view in wanted if view.state is BlockState.FAILED]:
        return f"all models are loaded, except {', '.join(failed)}, which failed"
    return "all models are loaded" if wanted else "no models are deployed"


def _is_awaited(view: BlockView, held_blocks: Collection[str]) -> bool:
    """Return whether the gateway is not ready for the first time until this block is loaded or has failed."""
    is_there = view.state in SERVABLE and view.block_id in held_blocks
    return not (is_there or view.is_new or view.state is BlockState.FAILED)


def _describe(view: BlockView) -> str:
    return f"model '{view.model}' version {view.version}"
