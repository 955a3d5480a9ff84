"""Whether requests should be sent to this gateway, and which blocks answer nobody. Decides; never acts.

It is ready from when the first models have settled until it drains, unless a block that has served answers nobody any
more: no worker has it, or its requests wait and time out, none was answered for a while, and probes of it are not
answered either. What is loaded anew, what is replaced by another version, and what never loaded does not make it
unready, unless nothing at all loads.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.core.blocks import SERVABLE, BlockState, BlockView
from penstock.router.slots import BlockActivity

PATIENCE = 2.0  # a block is not stuck before so many times what its slowest answer took
PROBE_S = 2.0  # what workers get to say that a block works which seems stuck; they are asked each second
FORGET_S = 30.0  # without a request, a block that was stuck is given another chance


@dataclass(slots=True)
class _Watch:
    looked: float
    heard: float
    unanswered: int  # when it was last heard of
    stuck_s: float = 0.0  # in which requests were in hand and none was answered
    idle_s: float = 0.0
    slowest_s: float = 0.0
    next_probe: float = 0.0
    is_stuck: bool = False


class Readiness:
    def __init__(self) -> None:
        self._has_settled = False
        self._watches: dict[str, _Watch] = {}

    def look(self, activities: Mapping[str, BlockActivity], now: float) -> list[str]:
        """Returns the blocks to probe: one that says that it works is only busy, or nobody waited for its answers.

        Call it some times a second, with the blocks that are in memory: what is being loaded is not stuck."""
        self._watches = {block_id: watch for block_id, watch in self._watches.items() if block_id in activities}
        probed: list[str] = []
        for block_id, seen in activities.items():
            watch = self._watches.get(block_id)
            if watch is None:
                watch = self._watches[block_id] = _Watch(now, seen.heard, seen.unanswered)
            if self._is_suspect(watch, seen, now) and watch.next_probe <= now:
                watch.next_probe = now + PROBE_S / 2
                probed.append(block_id)
        return probed

    def is_stuck(self, block_id: str) -> bool:
        watch = self._watches.get(block_id)
        return watch is not None and watch.is_stuck

    def problem(self, views: Iterable[BlockView], held: Collection[str]) -> str:
        """Why no requests should be sent here; empty: they should. `held` are the blocks that workers offer here."""
        wanted = [view for view in views if view.state is not BlockState.UNLOADED]
        if not self._has_settled:
            awaited = [view for view in wanted if not _is_settled(view, held)]
            if awaited:
                is_elsewhere = awaited[0].state in SERVABLE
                return f"{_name(awaited[0])} " + (
                    "has no worker at this gateway yet" if is_elsewhere else "is being loaded"
                )
            self._has_settled = True
        serving = {view.model for view in wanted if view.block_id in held}
        for view in wanted:
            is_replaced = view.state is BlockState.FAILED and view.model in serving  # another version stands in for it
            if view.has_served and view.block_id not in held and not is_replaced:
                return f"{_name(view)} has no worker"
            if view.block_id in held and self.is_stuck(view.block_id):
                stuck_s = self._watches[view.block_id].stuck_s
                return f"{_name(view)} has answered none of its requests for {stuck_s:.0f} s"
        has_failed = any(view.state is BlockState.FAILED for view in wanted)
        return "no model could be loaded" if has_failed and not serving else ""

    def _is_suspect(self, watch: _Watch, seen: BlockActivity, now: float) -> bool:
        passed_s, watch.looked = now - watch.looked, now
        if seen.heard > watch.heard:
            if seen.unanswered == watch.unanswered:  # else what was too late is in the latency, too
                watch.slowest_s = max(watch.slowest_s, seen.latency_s)
            watch.heard, watch.unanswered, watch.stuck_s = seen.heard, seen.unanswered, 0.0
        elif seen.in_hand:
            watch.stuck_s += passed_s
            watch.idle_s = 0.0
        else:
            watch.idle_s += passed_s
            if watch.idle_s >= FORGET_S:
                watch.stuck_s, watch.unanswered = 0.0, seen.unanswered
        # One that has a single long request in hand, and nobody behind it, only takes its time.
        is_missed = seen.waiting > 0 or seen.unanswered > watch.unanswered
        limit_s = max(seen.unanswered_s, PATIENCE * watch.slowest_s)
        is_suspect = bool(seen.unanswered_s) and is_missed and watch.stuck_s >= limit_s
        watch.is_stuck = is_suspect and watch.stuck_s >= limit_s + PROBE_S
        return is_suspect


def _is_settled(view: BlockView, held: Collection[str]) -> bool:
    is_there = view.state in SERVABLE and view.block_id in held
    return is_there or view.is_new or view.state is BlockState.FAILED


def _name(view: BlockView) -> str:
    return f"model '{view.model}' version {view.version}"
