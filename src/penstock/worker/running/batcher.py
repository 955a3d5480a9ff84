"""Which waiting pieces go into the next batch. Decides; never acts.

The oldest piece of the highest level that waits anchors the batch; the pieces nearest to it in length fill it up,
so little is padded: first those of its level, then those of the levels below. Only pieces near the front of the line
may fill: each that is taken from further back makes the others wait longer. A batch closes at its row or token
budget, where padding would pass its bound, or because nothing more that fits is waiting. It is work-conserving:
only `max_delay_s` makes it wait.

Within a level nobody starves: its oldest piece is in the level's next batch, or in the one after it where its request
has had many and others wait, so that a request of a thousand pieces does not hold them up to its end. A lower level has
what the higher ones leave, and waits for as long as they leave nothing: its queue timeout is what bounds that. A piece
past its queue deadline is taken out; or it is delayed, where its level says so, and served when nothing else waits.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Generator, Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Any

from penstock.core.settings import Batching


class Closed(StrEnum):
    ROWS = "rows"
    TOKENS = "tokens"
    PADDING = "padding"
    EMPTY = "empty"  # nothing else that may join was waiting
    DELAY = "delay"  # the oldest had waited for company long enough


@dataclass(slots=True, eq=False)
class QueuedPiece:
    """One piece in line."""

    owner: Any  # the job it belongs to
    index: int  # which of its pieces
    rows: int
    length: int
    key: Hashable
    deadline: float
    priority: int = 1  # its level; 1 is the highest
    queue_deadline: float = inf
    padding: int = 0  # of its tokens, what evens out its own rows
    arrived: float = 0.0
    sequence: int = 0
    level: Any = None  # the _Level that it waits in; None: in none


@dataclass(slots=True)
class Batch:
    entries: list[QueuedPiece]
    closed: Closed
    rows: int
    length: int  # of the longest
    tokens: int  # of the pieces as they are, without what they are padded with here

    @property
    def real_tokens(self) -> int:
        return self.tokens - sum(entry.padding for entry in self.entries)

    @property
    def padded_tokens(self) -> int:
        return self.rows * self.length


class _Level:
    """What waits of one level, delayed or not: by sequence, oldest first; by key, sorted by length and then by age."""

    __slots__ = ("by_key", "line")

    def __init__(self) -> None:
        self.line: dict[int, QueuedPiece] = {}
        self.by_key: dict[Hashable, list[QueuedPiece]] = {}


_position = attrgetter("length", "sequence")

# Added to the rank of what is delayed. No level is lower, so all that is not delayed comes first, as in the gateways.
DELAYED = 1000

# A batch's budget of tokens never shrinks below this part of it.
LEAST_PART = 4

# Batches in a row that the pieces of one request may anchor; then every second is another's.
IN_A_ROW = 16

# Yields the entry to try next, and is sent whether it was taken.
Line = Generator[QueuedPiece, bool, None]


class Batcher:
    def __init__(self, budget: Batching, delaying: Collection[int] = (), share: float = 1.0) -> None:
        """`delaying`: the levels whose pieces are delayed, not taken out, when their queue deadline passes.

        `share`: of the waiting tokens, what one batch takes at most, while they are few.
        """
        self._budget = budget
        self._max_delay_s = budget.max_delay_ms / 1000
        self._share = share
        self._delaying = frozenset(delaying)
        self._levels: dict[int, _Level] = {}  # by rank; one that is made stays
        self._order: list[_Level] = []  # the same, the first to be served first
        self._sequence = 0
        self._head: object = None  # the oldest piece's owner, and how many batches its pieces have anchored
        self._anchored = 0
        self.tokens = 0  # of all pieces in line
        self.due = inf  # the earliest time at which `expire` may have something to do: what was due may have left

    def __len__(self) -> int:
        return sum(len(level.line) for level in self._order)

    def append(self, entries: Iterable[QueuedPiece], now: float) -> None:
        for entry in entries:
            entry.arrived = now
            self._put(entry, entry.priority)
            due = entry.deadline if entry.deadline < entry.queue_deadline else entry.queue_deadline
            if due < self.due:
                self.due = due

    def remove(self, entries: Iterable[QueuedPiece]) -> None:
        """Their owner left: those that still wait leave the line."""
        for entry in entries:
            if entry.level is not None:
                self._take(entry)

    def excuse(self, entries: Iterable[QueuedPiece]) -> None:
        """Their owner has begun to run: what its other pieces wait is no time in the queue any more."""
        for entry in entries:
            entry.queue_deadline = inf

    def expire(self, now: float) -> list[QueuedPiece]:
        """Takes out what is past its deadline, or past its queue deadline; delays the latter where its level does."""
        expired: list[QueuedPiece] = []
        delayed: list[QueuedPiece] = []
        self.due = inf
        for entry in chain.from_iterable(level.line.values() for level in self._order):
            if entry.deadline > now and entry.queue_deadline > now:
                self.due = min(self.due, entry.deadline, entry.queue_deadline)
            elif entry.deadline > now and entry.priority in self._delaying:
                delayed.append(entry)
            else:
                expired.append(entry)
        for entry in expired:
            self._take(entry)
        for entry in delayed:
            self._take(entry)
            entry.queue_deadline = inf
            self._put(entry, entry.priority + DELAYED)
            self.due = min(self.due, entry.deadline)
        return expired

    def next_batch(self, now: float) -> Batch | None:
        """The batch that an idle instance should run now; None: nothing waits, or it is worth waiting for more."""
        for level in self._order:
            if level.line:
                break
        else:
            return None
        batch = self._fill(self._anchor(level))
        if batch.closed is Closed.EMPTY and self._max_delay_s > 0:
            if now < self.wake_at():
                return None
            batch.closed = Closed.DELAY
        for entry in batch.entries:
            self._take(entry)
        if not level.line:
            self._head = None
        return batch

    def _anchor(self, level: _Level) -> QueuedPiece:
        """The oldest piece; now and then that of another request."""
        oldest = next(iter(level.line.values()))
        if oldest.owner is not self._head:
            self._head, self._anchored = oldest.owner, 0
        self._anchored += 1
        if self._anchored > IN_A_ROW and self._anchored % 2:
            return next((entry for entry in level.line.values() if entry.owner is not oldest.owner), oldest)
        return oldest

    def wake_at(self) -> float:
        """When to ask for a batch again although nothing has arrived; inf: no need."""
        if self._max_delay_s <= 0:
            return inf
        arrivals = (next(iter(level.line.values())).arrived for level in self._order if level.line)
        return min(arrivals, default=inf) + self._max_delay_s

    def _put(self, entry: QueuedPiece, rank: int) -> None:
        level = self._levels.get(rank)
        if level is None:
            level = self._levels[rank] = _Level()
            self._order = [self._levels[known] for known in sorted(self._levels)]
        self._sequence += 1
        entry.sequence, entry.level = self._sequence, level
        level.line[entry.sequence] = entry
        self.tokens += entry.rows * entry.length
        alike = level.by_key.get(entry.key)
        if alike is None:
            level.by_key[entry.key] = [entry]
        elif alike[-1].length <= entry.length:
            alike.append(entry)
        else:
            insort(alike, entry, key=_position)

    def _take(self, entry: QueuedPiece) -> None:
        level: _Level = entry.level
        entry.level = None
        del level.line[entry.sequence]
        self.tokens -= entry.rows * entry.length
        alike = level.by_key[entry.key]
        if len(alike) == 1:
            del level.by_key[entry.key]
        elif alike[0] is entry:
            del alike[0]
        else:
            del alike[bisect_left(alike, _position(entry), key=_position)]

    def _fill(self, anchor: QueuedPiece) -> Batch:
        budget = self._budget
        tokens = anchor.rows * anchor.length
        batch = Batch([anchor], Closed.EMPTY, anchor.rows, anchor.length, tokens)
        if tokens and tokens == self.tokens:  # nothing else waits
            if batch.rows >= budget.max_rows:
                batch.closed = Closed.ROWS
            return batch
        max_tokens = self._tokens_now()
        reach = budget.reach_tokens
        if reach is not None and reach >= self.tokens:
            reach = None
        for level in self._order:
            if batch.rows >= budget.max_rows or (reach is not None and reach <= 0):
                break
            if level.line:
                line = _nearest(level, anchor, reach) if budget.order == "length" else _arrivals(level, anchor)
                self._join(batch, line, max_tokens)
                if reach is not None and level is not self._order[-1]:
                    reach -= sum(entry.rows * entry.length for entry in level.line.values())
        if batch.rows >= budget.max_rows:
            batch.closed = Closed.ROWS
        return batch

    def _tokens_now(self) -> int | None:
        """What waits is shared out, so that the next instance finds work, too; but batches stay worth their cost."""
        most = self._budget.max_tokens
        return None if most is None else min(most, max(most // LEAST_PART, int(self.tokens * self._share)))

    def _join(self, batch: Batch, line: Line, max_tokens: int | None) -> None:
        """Takes from the line what the budget allows."""
        rows, length, tokens = batch.rows, batch.length, batch.tokens
        entry = next(line, None)
        while entry is not None:
            with_rows = rows + entry.rows
            with_length = max(length, entry.length)
            with_tokens = tokens + entry.rows * entry.length
            refusal = self._refuses(with_rows, with_length, with_tokens, max_tokens)
            if refusal is None:
                batch.entries.append(entry)
                rows, length, tokens = with_rows, with_length, with_tokens
            else:
                batch.closed = refusal
            try:
                entry = line.send(refusal is None)
            except StopIteration:
                break
        batch.rows, batch.length, batch.tokens = rows, length, tokens

    def _refuses(self, rows: int, length: int, tokens: int, max_tokens: int | None) -> Closed | None:
        budget = self._budget
        if rows > budget.max_rows:
            return Closed.ROWS
        if max_tokens is not None and rows * length > max_tokens:
            return Closed.TOKENS
        if budget.order == "length":
            padding = rows * length - tokens
            if padding > budget.free_padding and padding > tokens * budget.max_padding:
                return Closed.PADDING
        return None


def _arrivals(level: _Level, anchor: QueuedPiece) -> Line:
    """The others of the anchor's key in order of arrival, up to the first that is refused."""
    for entry in level.line.values():
        if entry.key == anchor.key and entry is not anchor and not (yield entry):
            return


def _nearest(level: _Level, anchor: QueuedPiece, reach: int | None) -> Line:
    """The others of the anchor's key, nearest in length first; a refusal ends its direction."""
    entries = level.by_key.get(anchor.key)
    if entries is None:
        return
    last = _last_in_reach(level, reach)
    above = bisect_left(entries, (anchor.length, 0), key=_position)  # of its own length the oldest are taken first
    below, end = above - 1, len(entries)
    while below >= 0 or above < end:
        go_down = above >= end or (
            below >= 0 and anchor.length - entries[below].length < entries[above].length - anchor.length
        )
        entry = entries[below if go_down else above]
        is_welcome = entry is anchor or entry.sequence > last or (yield entry)
        if go_down:
            below = below - 1 if is_welcome else -1
        else:
            above = above + 1 if is_welcome else end


def _last_in_reach(level: _Level, reach: int | None) -> float:
    """The sequence of the last piece that may fill a batch."""
    if reach is None:
        return inf
    for entry in level.line.values():
        reach -= entry.rows * entry.length
        if reach <= 0:
            return entry.sequence
    return inf
