"""Decides which blocks a worker keeps in memory: which one to load next, and which ones to evict. Pure: no I/O.

A block that is not in memory may be dormant: it accepts jobs, and the first job triggers its load. One block is loaded
at a time. Under a memory budget, unused blocks are evicted to make room for a load, the least recently used first. If
their memory is not enough, the load waits until another block becomes idle. The reload of a serving block, and the load
of a version that replaces another version, do not wait: old and new are in memory together for a moment, even if they
exceed the budget. A new version of a serving model is loaded even if it is lazy, to make sure that it can be loaded. A
block that is no longer assigned accepts jobs until it has received none for `LINGER_S`, because gateways learn of its
removal one after the other.

A block on a GPU also waits for free memory of the GPU, which other processes use as well; each call of `record_use`
reports how much is free. Unused blocks of this worker are evicted to make room on the GPU, too. On a GPU, a reload also
waits until the new revision fits beside the serving one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from penstock.core.blocks import BlockState
from penstock.core.error_text import show_size
from penstock.worker.residency.residency_actions import (
    Action,
    BlockAssignment,
    DeviceRoom,
    FailBlock,
    ForgetBlock,
    LoadBlock,
    LoadEstimate,
    LoadReason,
    MakeBlockDormant,
    SurveyBlocks,
    UnloadBlock,
)

LINGER_S = 0.25  # a block that is no longer wanted accepts jobs until it has received none for this time
NO_ROOM = (
    "the models in use leave too little of worker.memory_budget_bytes: raise the budget, or load the model again later"
)


@dataclass(slots=True)
class HeldBlock:
    block: BlockAssignment  # the newest assignment; an older revision may be serving
    state: BlockState = BlockState.LOADING
    reason: str = ""
    estimate: LoadEstimate | None = None
    is_surveyed: bool = False  # whether `estimate` belongs to the newest assignment
    size_bytes: int = 0  # measured at the last load; before the first load, the size of its files
    is_resident: bool = False
    resident_bytes: int = 0
    last_used: float = 0.0
    leaves: float = inf  # when it was no longer assigned; it is unloaded after a moment without jobs
    device_bytes: int = 0  # the GPU memory that it needs: measured, or as configured
    on_device: tuple[str, int] = ("", 0)  # the resident revision's GPU, and the memory that it took there


@dataclass(slots=True)
class _LoadRequest:
    reason: LoadReason
    may_evict: bool
    expires_at: float = inf


@dataclass(slots=True)
class _RunningLoad:
    block: BlockAssignment
    request: _LoadRequest
    room_bytes: int  # memory kept free for this load; 0 for a reload
    is_withdrawn: bool = False  # withdrawn during the load: if the block is assigned again, it is loaded again


class Residency:
    """Decides which blocks of a worker are loaded, evicted and unloaded, and tracks the memory that they need."""

    def __init__(self, budget_bytes: int = 0, drain_s: float = 20.0) -> None:
        """Start without blocks. A budget of 0 means no limit.

        Blocks that are no longer assigned are unloaded after `drain_s` at the latest.
        """
        self.held_blocks: dict[str, HeldBlock] = {}
        self._drain_s = drain_s
        self._budget: float = budget_bytes or inf
        self._queue: dict[str, _LoadRequest] = {}  # blocks to load, oldest first
        self._loading: _RunningLoad | None = None
        self._leaving_bytes = 0  # of blocks that are being released, but are still in memory
        self._busy: set[str] = set()
        self._rooms: Mapping[str, DeviceRoom] = {}  # of the GPUs that blocks wait for

    @property
    def occupied_bytes(self) -> int:
        """The memory of all blocks that are loaded, being loaded, or being unloaded."""
        return self._used_bytes() + self._leaving_bytes

    def waiting_reason(self, block_id: str) -> str:
        if self._loading is None:
            if self.lacks_device(block_id):
                return self._device_full_reason(self.held_blocks[block_id])
            return "the models in use leave too little of worker.memory_budget_bytes"
        return "it is being loaded" if self._loading.block.block_id == block_id else "other models are loaded first"

    def lacks_device(self, block_id: str) -> bool:
        """Return whether the block's GPU is known to have too little free memory for the block."""
        held = self.held_blocks.get(block_id)
        return held is not None and _wanted_device(held) in self._rooms and self._lacking_bytes(held) > 0

    def is_short_of_device(self) -> bool:
        """Return whether a block waits for GPU memory, and not for the load of another block."""
        return self._loading is None and any(map(self.lacks_device, self._queue))

    def devices_wanted(self) -> set[str]:
        """Return the GPUs that blocks wait for; the next call of `record_use` must report their free memory."""
        waiting = [*self._queue, *([self._loading.block.block_id] if self._loading is not None else [])]
        return {device for block_id in waiting if (device := _wanted_device(self.held_blocks.get(block_id)))}

    # --- events

    def record_use(
        self, busy: Iterable[str], used: Iterable[str], now: float, rooms: Mapping[str, DeviceRoom] | None = None
    ) -> None:
        """Record the blocks that have jobs (`busy`) or ran jobs since the last call (`used`), and GPUs' free memory.

        Call this method before every event that may evict blocks, so that the decision uses current values.
        """
        self._busy = set(busy)
        self._rooms = rooms or {}
        for block_id in (*self._busy, *used):
            if (held := self.held_blocks.get(block_id)) is not None:
                held.last_used = now

    def assign(self, blocks: Iterable[BlockAssignment], now: float) -> list[Action]:
        """Start to load newly assigned blocks and revisions, and remove all blocks that are not in the list."""
        wanted = {block.block_id: block for block in blocks}
        actions: list[Action] = []
        for known in [known for known in self.held_blocks if known not in wanted]:
            actions += self._withdraw_block(known, now)
        fresh: list[BlockAssignment] = []
        for block_id, block in wanted.items():
            held = self.held_blocks.get(block_id)
            if held is not None:
                held.leaves = inf
            if held is None:
                self.held_blocks[block_id] = HeldBlock(block)
            elif held.block.revision != block.revision:  # a lower revision is possible after the store was restored
                held.block, held.state, held.reason, held.is_surveyed = block, BlockState.LOADING, "", False
            else:
                held.block = block  # the blocks that it replaces may have changed
                continue
            fresh.append(block)
        if fresh:
            actions.append(SurveyBlocks(tuple(fresh)))
        return actions + self._start_next_load(now)

    def on_surveyed(self, block: BlockAssignment, estimate: LoadEstimate, now: float) -> list[Action]:
        held = self.held_blocks.get(block.block_id)
        if held is None or held.block != block or held.leaves < inf:
            return []  # an outdated survey; the current assignment has its own
        is_first = held.estimate is None
        if held.estimate is None or held.estimate.files_bytes != estimate.files_bytes:
            held.size_bytes, held.device_bytes = estimate.files_bytes, estimate.device_bytes
        held.estimate, held.is_surveyed = estimate, True
        if estimate.residence.device_memory_bytes:
            held.device_bytes = estimate.device_bytes
        actions: list[Action] = []
        if held.size_bytes > self._budget:
            actions.append(self._fail_block(held, self._too_large_reason(held.size_bytes)))
        elif estimate.device and held.device_bytes > estimate.device_total_bytes:
            actions.append(
                self._fail_block(held, _too_large_for_device_reason(estimate, held.device_bytes), is_device_full=True)
            )
        elif held.is_resident:
            self._queue[block.block_id] = _LoadRequest(LoadReason.RELOAD, may_evict=False)
        elif block.block_id not in self._queue and not self._is_block_loading(block.block_id):
            if estimate.residence.load == "lazy" and not block.is_new:
                actions.append(self._make_dormant(held))
            else:
                # The worker's first blocks are loaded only while they fit; a load that was requested may evict blocks.
                is_requested = not is_first or block.is_new
                until = now + estimate.residence.max_waiting_s if is_requested else inf
                self._queue[block.block_id] = _LoadRequest(LoadReason.START, is_requested, until)
        return actions + self._start_next_load(now)

    def demand(self, block_id: str, now: float) -> list[Action]:
        """Request the load of a dormant block for which a job waits."""
        held = self.held_blocks.get(block_id)
        if held is None or held.estimate is None or held.is_resident or held.state is BlockState.FAILED:
            return []
        until = now + held.estimate.residence.max_waiting_s
        want = self._queue.get(block_id)
        if want is None and self._loading is not None and self._is_block_loading(block_id):
            want = self._loading.request
        if want is None:
            self._queue[block_id] = _LoadRequest(LoadReason.DEMAND, may_evict=True, expires_at=until)
        else:
            want.reason, want.may_evict, want.expires_at = LoadReason.DEMAND, True, max(want.expires_at, until)
        return self._start_next_load(now)

    def on_loaded(
        self, block: BlockAssignment, size_bytes: int, now: float, on_device: tuple[str, int] = ("", 0)
    ) -> tuple[bool, list[Action]]:
        """Record a finished load; return whether to use the loaded block, and the next actions.

        If the block must not be used, unload it and then call `on_released`. `on_device`: the block's GPU, and the
        memory that the block took there.
        """
        assert self._loading is not None, "nothing was being loaded"
        loading, self._loading = self._loading, None
        held = self.held_blocks.get(block.block_id)
        if held is None or held.block != block or loading.is_withdrawn:
            self._leaving_bytes += size_bytes
            self._queue_newest_revision(loading)
            return False, self._start_next_load(now)
        if size_bytes > self._budget:
            self._leaving_bytes += size_bytes
            return False, [self._fail_block(held, self._too_large_reason(size_bytes)), *self._start_next_load(now)]
        if held.is_resident:
            self._leaving_bytes += held.resident_bytes
        held.is_resident, held.resident_bytes, held.size_bytes = True, size_bytes, size_bytes
        held.on_device = on_device
        if on_device[1] and held.estimate is not None and not held.estimate.residence.device_memory_bytes:
            held.device_bytes = on_device[1]
        held.state, held.reason, held.last_used = BlockState.READY, "", now
        if loading.request.reason is LoadReason.DEMAND:
            self._busy.add(block.block_id)  # the waiting jobs come next
        return True, self._start_next_load(now)

    def on_postponed(self, block: BlockAssignment) -> None:
        """Queue the block again, because another process is claiming memory on its GPU."""
        assert self._loading is not None, "nothing was being loaded"
        loading, self._loading = self._loading, None
        self._rooms = {}
        if block.block_id in self.held_blocks and not loading.is_withdrawn:
            self._queue.setdefault(block.block_id, loading.request)

    def on_load_failed(
        self, block: BlockAssignment, reason: str, now: float, is_device_full: bool = False
    ) -> list[Action]:
        """Handle a failed load or survey. If the GPU was full, assume that the block needs more than was free."""
        held = self.held_blocks.get(block.block_id)
        is_current = held is not None and held.block == block
        if held is not None and is_device_full:
            held.device_bytes = max(held.device_bytes, self._free_room(_wanted_device(held)).free_bytes + 1)
        if self._loading is not None and self._loading.block == block:
            loading, self._loading = self._loading, None
            if not is_current:
                self._queue_newest_revision(loading)
        actions: list[Action] = []
        if held is not None and is_current:
            actions.append(self._fail_block(held, reason, is_device_full))
        return actions + self._start_next_load(now)

    def on_released(self, size_bytes: int, now: float) -> list[Action]:
        """Record that an unloaded block, or a replaced or rejected revision, has been freed from memory."""
        self._leaving_bytes -= size_bytes
        return self._start_next_load(now)

    def tick(self, now: float) -> list[Action]:
        leaving = [held for held in self.held_blocks.values() if self._may_be_unloaded(held, now)]
        actions: list[Action] = [self._unload_block(held) for held in leaving]
        for held in self.held_blocks.values():
            idle_s = held.estimate.residence.idle_unload_s if held.estimate is not None else 0.0
            if idle_s and now - held.last_used >= idle_s and self._may_be_evicted(held, now):
                actions += self._unload_and_make_dormant(held, "idle")
        for block_id in [waiting for waiting, request in self._queue.items() if request.expires_at <= now]:
            if not self.held_blocks[block_id].is_surveyed:
                continue
            del self._queue[block_id]
            held = self.held_blocks[block_id]
            if held.block.is_new and held.state is BlockState.LOADING:
                lacks = self.lacks_device(block_id)
                actions.append(self._fail_block(held, self._device_full_reason(held) if lacks else NO_ROOM, lacks))
            elif held.state is not BlockState.DORMANT:
                actions.append(self._make_dormant(held))
        return actions + self._start_next_load(now)

    # --- consequences

    def _start_next_load(self, now: float) -> list[Action]:
        """Start the first queued load that fits into memory, or evict blocks so that a load will fit."""
        actions = self._evict_over_budget(now)
        if self._loading is not None:
            return actions
        # Loads that no job waits for come last.
        for block_id, request in sorted(self._queue.items(), key=lambda item: item[1].reason is LoadReason.START):
            held = self.held_blocks[block_id]
            if not held.is_surveyed:
                continue
            short = self.occupied_bytes + held.size_bytes - self._replaced_bytes(held) - self._budget
            leaving_bytes = self._leaving_bytes + self._leaving_when_idle_bytes()
            if held.is_resident or short <= 0:
                if self._lacking_bytes(held) <= 0:
                    return [*actions, self._start_load(held, request)]
                actions += self._make_device_room(held, request, now)
                continue
            if short <= leaving_bytes:
                return actions  # memory for this block is being freed, and no other block may use it
            if not request.may_evict:
                del self._queue[block_id]
                actions.append(self._make_dormant(held))
            elif victims := self._choose_evictions(short - leaving_bytes, now, held.block.replaces):
                for victim in victims:
                    actions += self._unload_and_make_dormant(victim, "evicted")
                return actions
            # All other blocks are in use, but a smaller block later in the queue may fit.
        return actions

    def _make_device_room(self, held: HeldBlock, request: _LoadRequest, now: float) -> list[Action]:
        device, block_id = _wanted_device(held), held.block.block_id
        if device not in self._rooms or self._leaving_bytes or self._free_room(device).claimed_bytes:
            return []  # wait until `record_use` reports the GPU, blocks are released, and other processes have loaded
        if held.is_resident:
            return [self._fail_block(held, self._device_full_reason(held), is_device_full=True)]
        if not request.may_evict:
            del self._queue[block_id]
            return [self._make_dormant(held, self._device_full_reason(held))]
        victims = self._choose_evictions(self._lacking_bytes(held), now, held.block.replaces, device)
        return [action for victim in victims for action in self._unload_and_make_dormant(victim, "evicted")]

    def _lacking_bytes(self, held: HeldBlock) -> int:
        """Return how much memory the block lacks on its GPU, whose free memory counts as 0 if it is unknown."""
        return held.device_bytes - self._free_room(device).free_bytes if (device := _wanted_device(held)) else 0

    def _free_room(self, device: str) -> DeviceRoom:
        return self._rooms.get(device, DeviceRoom(0))

    def _device_full_reason(self, held: HeldBlock) -> str:
        device = _wanted_device(held)
        return (
            f"it needs {show_size(held.device_bytes)} on {device}, where "
            f"{show_size(self._free_room(device).free_bytes)} are free: stop other users of that GPU, choose another "
            "(instances.device), or set the model's real need (residence.device_memory_bytes)"
        )

    def _evict_over_budget(self, now: float) -> list[Action]:
        """Evict idle blocks while the loaded blocks exceed the budget: a loaded block may be larger than its files."""
        actions: list[Action] = []
        over = self._used_bytes() - self._soon_free_bytes() - self._budget
        for held in self._evictable_blocks(now) if over > 0 else ():
            if over > 0:
                over -= held.resident_bytes
                actions += self._unload_and_make_dormant(held, "evicted")
        return actions

    def _start_load(self, held: HeldBlock, request: _LoadRequest) -> LoadBlock:
        del self._queue[held.block.block_id]
        if held.is_resident:
            request.reason = LoadReason.RELOAD
        room_bytes = 0 if held.is_resident else max(0, held.size_bytes - self._replaced_bytes(held))
        self._loading = _RunningLoad(held.block, request, room_bytes)
        device = _wanted_device(held)
        return LoadBlock(held.block, request.reason, device, held.device_bytes if device else 0)

    def _choose_evictions(
        self, needed_bytes: float, now: float, spared: Sequence[str], device: str = ""
    ) -> list[HeldBlock]:
        """Return the least recently used blocks that together free enough memory, or none if all free too little."""
        victims: list[HeldBlock] = []
        for held in self._evictable_blocks(now):
            if needed_bytes <= 0:
                break
            if held.block.block_id in spared or (device and held.on_device[0] != device):
                continue
            victims.append(held)
            needed_bytes -= held.on_device[1] if device else held.resident_bytes
        return victims if needed_bytes <= 0 else []

    def _evictable_blocks(self, now: float) -> list[HeldBlock]:
        """Return the blocks that may be evicted, the least recently used first."""
        return sorted(
            (held for held in self.held_blocks.values() if self._may_be_evicted(held, now)),
            key=lambda held: held.last_used,
        )

    def _may_be_evicted(self, held: HeldBlock, now: float) -> bool:
        """Return whether the block is in memory and idle, and is not loading (or failed to load) a new revision."""
        if not held.is_resident or held.state is not BlockState.READY or held.block.block_id in self._busy:
            return False
        if held.leaves < inf:
            return False  # it will be unloaded anyway
        return held.estimate is None or now - held.last_used >= held.estimate.keep_s

    def _unload_and_make_dormant(self, held: HeldBlock, event: str) -> list[Action]:
        held.is_resident = False
        self._leaving_bytes += held.resident_bytes
        return [UnloadBlock(held.block.block_id, event), self._make_dormant(held)]

    def _make_dormant(self, held: HeldBlock, reason: str = "") -> MakeBlockDormant:
        held.state, held.reason = BlockState.DORMANT, reason
        return MakeBlockDormant(held.block.block_id)

    def _fail_block(self, held: HeldBlock, reason: str, is_device_full: bool = False) -> FailBlock:
        held.state, held.reason = BlockState.FAILED, reason
        self._queue.pop(held.block.block_id, None)
        return FailBlock(held.block, reason, is_device_full)

    def _withdraw_block(self, block_id: str, now: float) -> list[Action]:
        """Remove a block that is no longer assigned; if it is in memory, it accepts jobs for a moment longer."""
        held = self.held_blocks[block_id]
        self._queue.pop(block_id, None)
        if self._loading is not None and self._loading.block.block_id == block_id:
            self._loading.is_withdrawn = True
        if held.is_resident:
            held.leaves = min(held.leaves, now)
            return []
        del self.held_blocks[block_id]
        return [ForgetBlock(block_id)]

    def _may_be_unloaded(self, held: HeldBlock, now: float) -> bool:
        is_busy = held.block.block_id in self._busy
        is_idle = not is_busy and now - max(held.last_used, held.leaves) >= LINGER_S
        return held.leaves <= now and (is_idle or now - held.leaves >= self._drain_s)

    def _unload_block(self, held: HeldBlock) -> UnloadBlock:
        del self.held_blocks[held.block.block_id]
        self._leaving_bytes += held.resident_bytes
        return UnloadBlock(held.block.block_id, "unloaded")

    def _queue_newest_revision(self, loading: _RunningLoad) -> None:
        """Queue the load of the block's newest revision, because the finished load was of an older one."""
        held = self.held_blocks.get(loading.block.block_id)
        if held is not None and held.state is not BlockState.FAILED and not loading.is_withdrawn:
            self._queue.setdefault(held.block.block_id, loading.request)

    def _is_block_loading(self, block_id: str) -> bool:
        loading = self._loading
        return loading is not None and loading.block.block_id == block_id and not loading.is_withdrawn

    def _used_bytes(self) -> int:
        return self._resident_bytes() + (self._loading.room_bytes if self._loading is not None else 0)

    def _leaving_when_idle_bytes(self) -> int:
        """Return the memory of the blocks that will be unloaded as soon as they are idle."""
        return self._resident_bytes(lambda held: held.leaves < inf)

    def _replaced_bytes(self, held: HeldBlock) -> int:
        """Return the memory of the blocks that this block replaces; they stay in memory until it is loaded."""
        replaced = held.block.replaces
        return self._resident_bytes(lambda other: other.block.block_id in replaced and other.leaves == inf)

    def _soon_free_bytes(self) -> int:
        """Return the memory of the blocks that will be unloaded soon: replaced ones, and ones no longer assigned."""
        replaced = {
            block_id for held in self.held_blocks.values() for block_id in held.block.replaces if held.is_resident
        }
        return self._resident_bytes(lambda held: held.leaves < inf or held.block.block_id in replaced)

    def _resident_bytes(self, is_counted: Callable[[HeldBlock], bool] = lambda held: True) -> int:
        return sum(held.resident_bytes for held in self.held_blocks.values() if held.is_resident and is_counted(held))

    def _too_large_reason(self, size_bytes: int) -> str:
        return (
            f"the model takes {size_bytes} bytes of memory, more than worker.memory_budget_bytes ({self._budget:.0f}): "
            "raise the budget, or serve the model from a worker with more memory"
        )


def _wanted_device(held: HeldBlock | None) -> str:
    """Return the GPU on which the block needs memory, or an empty text."""
    return held.estimate.device if held is not None and held.estimate is not None and held.device_bytes else ""


def _too_large_for_device_reason(estimate: LoadEstimate, device_bytes: int) -> str:
    return (
        f"it needs {show_size(device_bytes)} on {estimate.device}, which has {show_size(estimate.device_total_bytes)} "
        "in total: choose another GPU (instances.device), or set the model's real need (residence.device_memory_bytes)"
    )
