"""Which waiting pieces go into the next batch. Decides; never acts.

The oldest piece anchors the batch, so nobody starves; the pieces nearest to it in length fill it up,
so little is padded. Only pieces near the front of the line may fill: each that is taken from further back
makes the others wait longer. A batch closes at its row or token budget, where padding would pass its bound,
or because nothing more that fits is waiting. It is work-conserving: only `max_delay_s` makes it wait.
"""

from bisect import bisect_left, insort
from collections.abc import Generator, Hashable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any


class Closed(StrEnum):
    ROWS = "rows"
    TOKENS = "tokens"
    PADDING = "padding"
    EMPTY = "empty"  # nothing else that may join was waiting
    DELAY = "delay"  # the oldest had waited for company long enough


@dataclass(slots=True, eq=False)
class Entry:
    """One piece in line."""

    owner: Any  # the job it belongs to
    index: int  # which of its pieces
    rows: int
    length: int
    key: Hashable
    deadline: float
    arrived: float = 0.0
    sequence: int = 0


@dataclass(slots=True)
class Batch:
    entries: list[Entry]
    closed: Closed
    rows: int
    length: int  # of the longest

    @property
    def padded_tokens(self) -> int:
        return self.rows * self.length


@dataclass(slots=True)
class _Lane:
    """The waiting pieces of one key, sorted by length and then by age."""

    entries: list[Entry] = field(default_factory=list)


_position = attrgetter("length", "sequence")

# A batch's budget of tokens never shrinks below this part of it.
LEAST_PART = 4

# Yields the entry to try next, and is sent whether it was taken.
Line = Generator[Entry, bool, None]


@dataclass(frozen=True, slots=True)
class Budget:
    max_rows: int
    max_tokens: int | None = None
    max_padding: float = 0.05
    free_padding: int = 0
    max_delay_s: float = 0.0
    by_length: bool = True
    reach_tokens: int | None = None  # how far down the line a batch looks for its like; None: to its end
    share: float = 1.0  # of the waiting tokens that one batch takes at most, while they are few

    def tokens_now(self, waiting: int) -> int | None:
        """What waits is shared out, so that the next instance finds work, too; but batches stay worth their cost."""
        if self.max_tokens is None:
            return None
        return min(self.max_tokens, max(self.max_tokens // LEAST_PART, int(waiting * self.share)))


class Batcher:
    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._line: dict[int, Entry] = {}  # by sequence: oldest first
        self._lanes: dict[Hashable, _Lane] = {}
        self._sequence = 0
        self._tokens = 0  # of all that waits

    def __len__(self) -> int:
        return len(self._line)

    @property
    def tokens(self) -> int:
        """Of all that waits."""
        return self._tokens

    def append(self, entries: Iterable[Entry], now: float) -> None:
        for entry in entries:
            self._sequence += 1
            entry.sequence, entry.arrived = self._sequence, now
            self._line[entry.sequence] = entry
            self._tokens += entry.rows * entry.length
            lane = self._lanes.setdefault(entry.key, _Lane())
            insort(lane.entries, entry, key=_position)

    def remove(self, owner: object) -> int:
        """The owner left: its pieces leave the line. Returns how many did."""
        leaving = [entry for entry in self._line.values() if entry.owner is owner]
        for entry in leaving:
            self._take(entry)
        return len(leaving)

    def expire(self, now: float) -> list[Entry]:
        """Takes out what is past its deadline."""
        expired = [entry for entry in self._line.values() if entry.deadline <= now]
        for entry in expired:
            self._take(entry)
        return expired

    def clear(self) -> list[Entry]:
        entries = list(self._line.values())
        self._line.clear()
        self._lanes.clear()
        self._tokens = 0
        return entries

    def next_batch(self, now: float) -> Batch | None:
        """The batch that an idle instance should run now; None: nothing waits, or it is worth waiting for more."""
        if not self._line:
            return None
        anchor = next(iter(self._line.values()))
        batch = self._fill(anchor)
        if batch.closed is Closed.EMPTY and self._budget.max_delay_s > 0:
            if now < anchor.arrived + self._budget.max_delay_s:
                return None
            batch.closed = Closed.DELAY
        for entry in batch.entries:
            self._take(entry)
        return batch

    def wake_at(self) -> float | None:
        """When to ask again although nothing has arrived; None: no need."""
        if not self._line or self._budget.max_delay_s <= 0:
            return None
        return next(iter(self._line.values())).arrived + self._budget.max_delay_s

    def _take(self, entry: Entry) -> None:
        del self._line[entry.sequence]
        self._tokens -= entry.rows * entry.length
        entries = self._lanes[entry.key].entries
        del entries[bisect_left(entries, _position(entry), key=_position)]
        if not entries:
            del self._lanes[entry.key]

    def _fill(self, anchor: Entry) -> Batch:
        batch = Batch([anchor], Closed.EMPTY, anchor.rows, anchor.length)
        real_tokens = anchor.rows * anchor.length
        max_tokens = self._budget.tokens_now(self._tokens)
        line = self._nearest(anchor) if self._budget.by_length else self._arrivals(anchor)
        entry = next(line, None)
        while entry is not None:
            rows = batch.rows + entry.rows
            length = max(batch.length, entry.length)
            tokens = real_tokens + entry.rows * entry.length
            refusal = self._refuses(rows, length, tokens, max_tokens)
            if refusal is None:
                batch.entries.append(entry)
                batch.rows, batch.length, real_tokens = rows, length, tokens
            else:
                batch.closed = refusal
            try:
                entry = line.send(refusal is None)
            except StopIteration:
                break
        if batch.rows >= self._budget.max_rows:
            batch.closed = Closed.ROWS
        return batch

    def _refuses(self, rows: int, length: int, real_tokens: int, max_tokens: int | None) -> Closed | None:
        budget = self._budget
        if rows > budget.max_rows:
            return Closed.ROWS
        if max_tokens is not None and rows * length > max_tokens:
            return Closed.TOKENS
        if budget.by_length:
            padding = rows * length - real_tokens
            if padding > budget.free_padding and padding > real_tokens * budget.max_padding:
                return Closed.PADDING
        return None

    def _arrivals(self, anchor: Entry) -> Line:
        """The others of the anchor's key in order of arrival, up to the first that is refused."""
        for entry in self._line.values():
            if entry.key == anchor.key and entry is not anchor and not (yield entry):
                return

    def _nearest(self, anchor: Entry) -> Line:
        """The others of the anchor's key, nearest in length first; a refusal ends its direction."""
        entries, last = self._lanes[anchor.key].entries, self._last_in_reach()
        above = bisect_left(entries, _position(anchor), key=_position) + 1
        below, end = above - 2, len(entries)
        while below >= 0 or above < end:
            go_down = above >= end or (
                below >= 0 and anchor.length - entries[below].length < entries[above].length - anchor.length
            )
            entry = entries[below if go_down else above]
            is_welcome = entry.sequence > last or (yield entry)
            if go_down:
                below = below - 1 if is_welcome else -1
            else:
                above = above + 1 if is_welcome else end

    def _last_in_reach(self) -> int:
        """The sequence of the last piece that may fill a batch."""
        reach = self._budget.reach_tokens
        if reach is None or self._tokens <= reach:
            return self._sequence
        for entry in self._line.values():
            reach -= entry.rows * entry.length
            if reach <= 0:
                return entry.sequence
        return self._sequence
