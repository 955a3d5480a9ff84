"""Which blocks a worker has in memory: what is loaded next, what goes, and who makes room. Decides; never acts.

A block that is not in memory may be dormant: its jobs are taken, and the first of them has it loaded. One block is
loaded at a time. Under a budget, blocks that nobody uses make room, the least recently used first; where that does not
suffice, a load waits until another block falls idle. A reload of a block that serves needs no room: for the moment
both its revisions are in memory, whatever the budget. So for a version that replaces another. A new version of a model
that serves is loaded even where it is lazy, so that it is known to load before it is asked. What is no longer wanted
takes jobs until none has come for a moment: gateways hear of it one after the other.

A block on a GPU also waits for its memory, whose other users nobody here decides on: what is free is told with each
look. Those of this worker that nobody uses make room there, too. A reload needs its room beside what serves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from penstock.core.blocks import BlockState
from penstock.core.error_text import show_size
from penstock.worker.residency.steps import (
    Action,
    Assigned,
    DeviceRoom,
    FailBlock,
    ForgetBlock,
    LoadBlock,
    Outlook,
    RestBlock,
    SurveyBlocks,
    UnloadBlock,
    Why,
)

LINGER_S = 0.25  # a block that is not wanted any more takes jobs until none came for so long
NO_ROOM = (
    "the models in use leave no room for it in worker.memory_budget_bytes: raise the budget, or load it again later"
)


@dataclass(slots=True)
class HeldBlock:
    block: Assigned  # the newest assignment; what serves may be an older revision
    state: BlockState = BlockState.LOADING
    reason: str = ""
    outlook: Outlook | None = None
    is_surveyed: bool = False  # the outlook is that of the newest assignment
    size_bytes: int = 0  # in memory, as measured when it was last loaded; before that its files'
    is_resident: bool = False
    resident_bytes: int = 0
    last_used: float = 0.0
    leaves: float = inf  # since when nobody wants it: it goes when it has been idle for a moment
    device_bytes: int = 0  # what it takes of its GPU: as the size, or as its settings say
    on_device: tuple[str, int] = ("", 0)  # of what is resident: the GPU, and what loading it took there


@dataclass(slots=True)
class _Want:
    why: Why
    may_evict: bool
    until: float = inf


@dataclass(slots=True)
class _Loading:
    block: Assigned
    want: _Want
    room_bytes: int  # kept free for it; 0 for a reload
    is_orphan: bool = False  # withdrawn meanwhile: should it be wanted again, that is another load


class Residency:
    def __init__(self, budget_bytes: int = 0, drain_s: float = 20.0) -> None:
        """A budget of 0 is none. What is not wanted any more goes after `drain_s`, idle or not."""
        self.held: dict[str, HeldBlock] = {}
        self._drain_s = drain_s
        self._budget: float = budget_bytes or inf
        self._line: dict[str, _Want] = {}  # blocks to load, oldest first
        self._loading: _Loading | None = None
        self._leaving_bytes = 0  # let go of, but not yet out of memory
        self._busy: set[str] = set()
        self._rooms: Mapping[str, DeviceRoom] = {}  # on GPUs that somebody waits for

    @property
    def occupied_bytes(self) -> int:
        """What is in memory, on its way in, or on its way out."""
        return self._settled_bytes() + self._leaving_bytes

    def why_waiting(self, block_id: str) -> str:
        if self._loading is None:
            if self.lacks_device(block_id):
                return self._no_device_room(self.held[block_id])
            return "the models in use leave no room in worker.memory_budget_bytes"
        return "it is being loaded" if self._loading.block.block_id == block_id else "others are loaded before it"

    def lacks_device(self, block_id: str) -> bool:
        """Whether a GPU has too little memory free for a block that waits for it."""
        held = self.held.get(block_id)
        return held is not None and _device_of(held) in self._rooms and self._lacking_bytes(held) > 0

    def is_short_of_device(self) -> bool:
        """Whether a block waits for nothing but a GPU's memory: while another is loaded, it waits for that first."""
        return self._loading is None and any(map(self.lacks_device, self._line))

    def devices_wanted(self) -> set[str]:
        """The GPUs that blocks wait for: what is free there is to be told with the next look."""
        waiting = [*self._line, *([self._loading.block.block_id] if self._loading is not None else [])]
        return {device for block_id in waiting if (device := _device_of(self.held.get(block_id)))}

    # --- what happens

    def look(
        self, busy: Iterable[str], used: Iterable[str], now: float, rooms: Mapping[str, DeviceRoom] | None = None
    ) -> None:
        """Which blocks in memory have jobs at this moment, which ran some since the last look, and what is free on the
        GPUs that are wanted.

        The shell looks before everything that may evict, so that nothing decides on yesterday's idleness.
        """
        self._busy = set(busy)
        self._rooms = rooms or {}
        for block_id in (*self._busy, *used):
            if (held := self.held.get(block_id)) is not None:
                held.last_used = now

    def assign(self, blocks: Iterable[Assigned], now: float) -> list[Action]:
        """These are wanted, at these revisions, and no others."""
        wanted = {block.block_id: block for block in blocks}
        actions: list[Action] = []
        for known in [known for known in self.held if known not in wanted]:
            actions += self._withdraw(known, now)
        fresh: list[Assigned] = []
        for block_id, block in wanted.items():
            held = self.held.get(block_id)
            if held is not None:
                held.leaves = inf
            if held is None:
                self.held[block_id] = HeldBlock(block)
            elif held.block.revision != block.revision:  # also a lower one: the store was set back
                held.block, held.state, held.reason, held.is_surveyed = block, BlockState.LOADING, "", False
            else:
                held.block = block  # it may have others to replace
                continue
            fresh.append(block)
        if fresh:
            actions.append(SurveyBlocks(tuple(fresh)))
        return actions + self._advance(now)

    def surveyed(self, block: Assigned, outlook: Outlook, now: float) -> list[Action]:
        held = self.held.get(block.block_id)
        if held is None or held.block != block or held.leaves < inf:
            return []  # what is wanted now has a survey of its own
        is_first = held.outlook is None
        if held.outlook is None or held.outlook.files_bytes != outlook.files_bytes:
            held.size_bytes, held.device_bytes = outlook.files_bytes, outlook.device_bytes
        held.outlook, held.is_surveyed = outlook, True
        if outlook.residence.device_memory_bytes:
            held.device_bytes = outlook.device_bytes
        actions: list[Action] = []
        if held.size_bytes > self._budget:
            actions.append(self._fail(held, self._too_large(held.size_bytes)))
        elif outlook.device and held.device_bytes > outlook.device_total_bytes:
            actions.append(self._fail(held, _too_large_for(outlook, held.device_bytes), is_device_full=True))
        elif held.is_resident:
            self._line[block.block_id] = _Want(Why.RELOAD, may_evict=False)
        elif block.block_id not in self._line and not self._is_loading(block.block_id):
            if outlook.residence.load == "lazy" and not block.is_new:
                actions.append(self._rest(held))
            else:
                # At the start the blocks are loaded while they fit. One that somebody loads anew may have its room.
                is_asked_for = not is_first or block.is_new
                until = now + outlook.residence.max_waiting_s if is_asked_for else inf
                self._line[block.block_id] = _Want(Why.START, is_asked_for, until)
        return actions + self._advance(now)

    def demand(self, block_id: str, now: float) -> list[Action]:
        """Somebody waits for the block."""
        held = self.held.get(block_id)
        if held is None or held.outlook is None or held.is_resident or held.state is BlockState.FAILED:
            return []
        until = now + held.outlook.residence.max_waiting_s
        want = self._line.get(block_id)
        if want is None and self._loading is not None and self._is_loading(block_id):
            want = self._loading.want
        if want is None:
            self._line[block_id] = _Want(Why.DEMAND, may_evict=True, until=until)
        else:
            want.why, want.may_evict, want.until = Why.DEMAND, True, max(want.until, until)
        return self._advance(now)

    def loaded(
        self, block: Assigned, size_bytes: int, now: float, on_device: tuple[str, int] = ("", 0)
    ) -> tuple[bool, list[Action]]:
        """Whether what was loaded is to be taken up, and what to do next. `released` must tell when it is gone.

        `on_device`: its GPU, and what it took of its memory.
        """
        assert self._loading is not None, "nothing was being loaded"
        loading, self._loading = self._loading, None
        held = self.held.get(block.block_id)
        if held is None or held.block != block or loading.is_orphan:
            self._leaving_bytes += size_bytes
            self._queue_again(loading)
            return False, self._advance(now)
        if size_bytes > self._budget:
            self._leaving_bytes += size_bytes
            return False, [self._fail(held, self._too_large(size_bytes)), *self._advance(now)]
        if held.is_resident:
            self._leaving_bytes += held.resident_bytes
        held.is_resident, held.resident_bytes, held.size_bytes = True, size_bytes, size_bytes
        held.on_device = on_device
        if on_device[1] and held.outlook is not None and not held.outlook.residence.device_memory_bytes:
            held.device_bytes = on_device[1]
        held.state, held.reason, held.last_used = BlockState.READY, "", now
        if loading.want.why is Why.DEMAND:
            self._busy.add(block.block_id)  # those who wait for it come next
        return True, self._advance(now)

    def postponed(self, block: Assigned) -> None:
        """It was not begun: somebody else is about to take the room on its GPU. It is looked at again."""
        assert self._loading is not None, "nothing was being loaded"
        loading, self._loading = self._loading, None
        self._rooms = {}
        if block.block_id in self.held and not loading.is_orphan:
            self._line.setdefault(block.block_id, loading.want)

    def failed(self, block: Assigned, reason: str, now: float, is_device_full: bool = False) -> list[Action]:
        """It could not be loaded, or its folder not be read. Where its GPU had no room, it takes more than was free."""
        held = self.held.get(block.block_id)
        is_current = held is not None and held.block == block
        if held is not None and is_device_full:
            held.device_bytes = max(held.device_bytes, self._room_on(_device_of(held)).free_bytes + 1)
        if self._loading is not None and self._loading.block == block:
            loading, self._loading = self._loading, None
            if not is_current:
                self._queue_again(loading)
        actions: list[Action] = []
        if held is not None and is_current:
            actions.append(self._fail(held, reason, is_device_full))
        return actions + self._advance(now)

    def released(self, size_bytes: int, now: float) -> list[Action]:
        """What was let go of, or replaced, or not taken up, is out of memory now."""
        self._leaving_bytes -= size_bytes
        return self._advance(now)

    def tick(self, now: float) -> list[Action]:
        leaving = [held for held in self.held.values() if self._may_leave(held, now)]
        actions: list[Action] = [self._let_go(held) for held in leaving]
        for held in self.held.values():
            idle_s = held.outlook.residence.idle_unload_s if held.outlook is not None else 0.0
            if idle_s and now - held.last_used >= idle_s and self._may_go(held, now):
                actions += self._send_to_rest(held, "idle")
        for block_id in [waiting for waiting, want in self._line.items() if want.until <= now]:
            if not self.held[block_id].is_surveyed:
                continue
            del self._line[block_id]
            held = self.held[block_id]
            if held.block.is_new and held.state is BlockState.LOADING:
                lacks = self.lacks_device(block_id)
                actions.append(self._fail(held, self._no_device_room(held) if lacks else NO_ROOM, lacks))
            elif held.state is not BlockState.DORMANT:
                actions.append(self._rest(held))
        return actions + self._advance(now)

    # --- how it follows

    def _advance(self, now: float) -> list[Action]:
        """Starts the first load in line that can have its room, or makes room for it."""
        actions = self._trim(now)
        if self._loading is not None:
            return actions
        # What is only loaded ahead waits for those that somebody asked for.
        for block_id, want in sorted(self._line.items(), key=lambda item: item[1].why is Why.START):
            held = self.held[block_id]
            if not held.is_surveyed:
                continue
            short = self.occupied_bytes + held.size_bytes - self._replaced_bytes(held) - self._budget
            leaving_bytes = self._leaving_bytes + self._unwanted_bytes()
            if held.is_resident or short <= 0:
                if self._lacking_bytes(held) <= 0:
                    return [*actions, self._start(held, want)]
                actions += self._make_device_room(held, want, now)
                continue
            if short <= leaving_bytes:
                return actions  # its room is on the way; nobody may take it meanwhile
            if not want.may_evict:
                del self._line[block_id]
                actions.append(self._rest(held))
            elif victims := self._victims(short - leaving_bytes, now, held.block.replaces):
                for victim in victims:
                    actions += self._send_to_rest(victim, "evicted")
                return actions
            # Everything else is in use; a smaller one further down the line may fit.
        return actions

    def _make_device_room(self, held: HeldBlock, want: _Want, now: float) -> list[Action]:
        device, block_id = _device_of(held), held.block.block_id
        if device not in self._rooms or self._leaving_bytes or self._room_on(device).claimed_bytes:
            return []  # it is decided when that is known, what goes has gone, and what others load is there
        if held.is_resident:
            return [self._fail(held, self._no_device_room(held), is_device_full=True)]
        if not want.may_evict:
            del self._line[block_id]
            return [self._rest(held, self._no_device_room(held))]
        victims = self._victims(self._lacking_bytes(held), now, held.block.replaces, device)
        return [action for victim in victims for action in self._send_to_rest(victim, "evicted")]

    def _lacking_bytes(self, held: HeldBlock) -> int:
        """On its GPU. Where nobody has told what is free there, all of it."""
        return held.device_bytes - self._room_on(device).free_bytes if (device := _device_of(held)) else 0

    def _room_on(self, device: str) -> DeviceRoom:
        return self._rooms.get(device, DeviceRoom(0))

    def _no_device_room(self, held: HeldBlock) -> str:
        device = _device_of(held)
        return (
            f"it needs {show_size(held.device_bytes)} on {device}, where {show_size(self._room_on(device).free_bytes)} "
            "are free: end what else uses that GPU, take another (instances.device), or say what the model really "
            "takes (residence.device_memory_bytes)"
        )

    def _trim(self, now: float) -> list[Action]:
        """A block may turn out larger than its files: then others go as soon as they may."""
        actions: list[Action] = []
        over = self._settled_bytes() - self._passing_bytes() - self._budget
        for held in self._idle(now) if over > 0 else ():
            if over > 0:
                over -= held.resident_bytes
                actions += self._send_to_rest(held, "evicted")
        return actions

    def _start(self, held: HeldBlock, want: _Want) -> LoadBlock:
        del self._line[held.block.block_id]
        if held.is_resident:
            want.why = Why.RELOAD
        room_bytes = 0 if held.is_resident else max(0, held.size_bytes - self._replaced_bytes(held))
        self._loading = _Loading(held.block, want, room_bytes)
        device = _device_of(held)
        return LoadBlock(held.block, want.why, device, held.device_bytes if device else 0)

    def _victims(self, needed_bytes: float, now: float, spared: Sequence[str], device: str = "") -> list[HeldBlock]:
        """The least recently used that make so much room together, in memory or on a GPU; none where all of them would
        not."""
        victims: list[HeldBlock] = []
        for held in self._idle(now):
            if needed_bytes <= 0:
                break
            if held.block.block_id in spared or (device and held.on_device[0] != device):
                continue
            victims.append(held)
            needed_bytes -= held.on_device[1] if device else held.resident_bytes
        return victims if needed_bytes <= 0 else []

    def _idle(self, now: float) -> list[HeldBlock]:
        """What may be evicted, the least recently used first."""
        return sorted((held for held in self.held.values() if self._may_go(held, now)), key=lambda held: held.last_used)

    def _may_go(self, held: HeldBlock, now: float) -> bool:
        """Not what has jobs, is being reloaded, or could not be loaded again because its newest revision is broken."""
        if not held.is_resident or held.state is not BlockState.READY or held.block.block_id in self._busy:
            return False
        if held.leaves < inf:
            return False  # it goes by itself, and does not come back
        return held.outlook is None or now - held.last_used >= held.outlook.keep_s

    def _send_to_rest(self, held: HeldBlock, event: str) -> list[Action]:
        held.is_resident = False
        self._leaving_bytes += held.resident_bytes
        return [UnloadBlock(held.block.block_id, event), self._rest(held)]

    def _rest(self, held: HeldBlock, reason: str = "") -> RestBlock:
        held.state, held.reason = BlockState.DORMANT, reason
        return RestBlock(held.block.block_id)

    def _fail(self, held: HeldBlock, reason: str, is_device_full: bool = False) -> FailBlock:
        held.state, held.reason = BlockState.FAILED, reason
        self._line.pop(held.block.block_id, None)
        return FailBlock(held.block, reason, is_device_full)

    def _withdraw(self, block_id: str, now: float) -> list[Action]:
        """What is in memory takes jobs for a moment longer."""
        held = self.held[block_id]
        self._line.pop(block_id, None)
        if self._loading is not None and self._loading.block.block_id == block_id:
            self._loading.is_orphan = True
        if held.is_resident:
            held.leaves = min(held.leaves, now)
            return []
        del self.held[block_id]
        return [ForgetBlock(block_id)]

    def _may_leave(self, held: HeldBlock, now: float) -> bool:
        is_busy = held.block.block_id in self._busy
        is_idle = not is_busy and now - max(held.last_used, held.leaves) >= LINGER_S
        return held.leaves <= now and (is_idle or now - held.leaves >= self._drain_s)

    def _let_go(self, held: HeldBlock) -> UnloadBlock:
        del self.held[held.block.block_id]
        self._leaving_bytes += held.resident_bytes
        return UnloadBlock(held.block.block_id, "unloaded")

    def _queue_again(self, loading: _Loading) -> None:
        """What was being loaded is outdated: those who wait for it wait for the newer revision."""
        held = self.held.get(loading.block.block_id)
        if held is not None and held.state is not BlockState.FAILED and not loading.is_orphan:
            self._line.setdefault(held.block.block_id, loading.want)

    def _is_loading(self, block_id: str) -> bool:
        loading = self._loading
        return loading is not None and loading.block.block_id == block_id and not loading.is_orphan

    def _settled_bytes(self) -> int:
        return self._resident_bytes() + (self._loading.room_bytes if self._loading is not None else 0)

    def _unwanted_bytes(self) -> int:
        """Of those that go as soon as they are idle."""
        return self._resident_bytes(lambda held: held.leaves < inf)

    def _replaced_bytes(self, held: HeldBlock) -> int:
        """What those take that go once this one is there: for the moment they need not make room for it."""
        replaced = held.block.replaces
        return self._resident_bytes(lambda other: other.block.block_id in replaced and other.leaves == inf)

    def _passing_bytes(self) -> int:
        """What is only for the moment beside what replaces it, or on its way out."""
        replaced = {block_id for held in self.held.values() for block_id in held.block.replaces if held.is_resident}
        return self._resident_bytes(lambda held: held.leaves < inf or held.block.block_id in replaced)

    def _resident_bytes(self, is_meant: Callable[[HeldBlock], bool] = lambda held: True) -> int:
        return sum(held.resident_bytes for held in self.held.values() if held.is_resident and is_meant(held))

    def _too_large(self, size_bytes: int) -> str:
        return (
            f"it takes {size_bytes} bytes of memory, more than worker.memory_budget_bytes ({self._budget:.0f}): "
            "raise the budget, or serve the model from a worker that has it to itself"
        )


def _device_of(held: HeldBlock | None) -> str:
    """The GPU whose memory is counted for it; empty: none."""
    return held.outlook.device if held is not None and held.outlook is not None and held.device_bytes else ""


def _too_large_for(outlook: Outlook, device_bytes: int) -> str:
    return (
        f"it needs {show_size(device_bytes)} on {outlook.device}, which has {show_size(outlook.device_total_bytes)} in "
        "all: take another GPU (instances.device), or say what the model really takes (residence.device_memory_bytes)"
    )
