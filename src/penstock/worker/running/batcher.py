"""Decides which waiting pieces form the next batch. Pure: no I/O.

The oldest piece of the highest waiting level anchors the batch. The pieces nearest to it in length fill the batch, so
that little is padded: first those of its level, then those of lower levels. Only pieces near the front of the queue
may fill, as each piece taken from further back makes the others wait longer. A batch is closed at its row or token
budget, when padding would exceed its limit, or when no other waiting piece fits. Only `max_delay_s` makes a batch
wait for more pieces.
Within a level no piece starves: the oldest piece is in the level's next batch. If its request has anchored many
batches in a row and others wait, it is in the batch after the next, so that a request of a thousand pieces does not
block the others. A lower level gets what the higher ones leave, and may wait for long; its queue timeout bounds that.
A piece past its queue deadline is removed, or, if its level says so, delayed and served when nothing else waits.
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


class CloseReason(StrEnum):
    ROWS = "rows"
    TOKENS = "tokens"
    PADDING = "padding"
    EMPTY = "empty"  # no other waiting piece may join
    DELAY = "delay"  # the oldest piece has waited long enough for more pieces


@dataclass(slots=True, eq=False)
class QueuedPiece:
    """A piece that waits for a batch."""

    owner: Any  # the job that the piece belongs to
    index: int  # position of the piece in its job
    rows: int
    length: int
    key: Hashable
    deadline: float
    priority: int = 1  # 1 is the highest
    queue_deadline: float = inf
    padding: int = 0  # tokens that pad its own rows
    arrived: float = 0.0
    sequence: int = 0
    level: Any = None  # the _Level that holds the piece, or None


@dataclass(slots=True)
class Batch:
    entries: list[QueuedPiece]
    closed: CloseReason
    rows: int
    length: int  # of the longest piece
    tokens: int  # of the pieces, without the padding that joining them adds

    @property
    def real_tokens(self) -> int:
        return self.tokens - sum(entry.padding for entry in self.entries)

    @property
    def padded_tokens(self) -> int:
        return self.rows * self.length


class _Level:
    """The waiting pieces of a priority level: `by_age`, the oldest first; `by_key`, by length and then by age."""

    __slots__ = ("by_age", "by_key")

    def __init__(self) -> None:
        self.by_age: dict[int, QueuedPiece] = {}
        self.by_key: dict[Hashable, list[QueuedPiece]] = {}


_position = attrgetter("length", "sequence")

# Added to the priority of delayed pieces, so that they come after all levels; gateways use the same number.
DELAYED = 1000

# A batch's token budget never shrinks below the configured budget divided by this number.
LEAST_PART = 4

# Number of batches in a row that one request's pieces may anchor; after them, another request anchors every second one.
MAX_ANCHORED_IN_A_ROW = 16

# Yields the next piece to try, and receives whether the batch took it.
Candidates = Generator[QueuedPiece, bool, None]


class Batcher:
    """Queues the pieces that wait for a block's instances, and forms batches of them."""

    def __init__(self, budget: Batching, delaying: Collection[int] = (), share: float = 1.0) -> None:
        """`delaying`: the levels whose pieces are delayed, instead of removed, at their queue deadline.

        `share`: the largest share of the waiting tokens that one batch takes while few tokens wait.
        """
        self._budget = budget
        self._max_delay_s = budget.max_delay_ms / 1000
        self._share = share
        self._delaying = frozenset(delaying)
        self._levels: dict[
            int, _Level
        ] = {}  # by rank, which is the priority, or more for delayed pieces; levels are never removed
        self._order: list[_Level] = []  # the levels in the order of service
        self._sequence = 0
        self._anchor_owner: object = (
            None  # the owner of the oldest piece; `_anchored_batches` counts the batches that its pieces anchored
        )
        self._anchored_batches = 0
        self.tokens = 0  # of all waiting pieces
        self.due = inf  # no piece expires before this time; the piece that set it may have been removed

    def __len__(self) -> int:
        return sum(len(level.by_age) for level in self._order)

    def append(self, entries: Iterable[QueuedPiece], now: float) -> None:
        for entry in entries:
            entry.arrived = now
            self._insert_piece(entry, entry.priority)
            due = entry.deadline if entry.deadline < entry.queue_deadline else entry.queue_deadline
            if due < self.due:
                self.due = due

    def remove(self, entries: Iterable[QueuedPiece]) -> None:
        """Remove the pieces of a job that has ended, if they still wait."""
        for entry in entries:
            if entry.level is not None:
                self._remove_piece(entry)

    def remove_queue_deadline(self, entries: Iterable[QueuedPiece]) -> None:
        """Remove the pieces' queue deadline, because another piece of their job has started."""
        for entry in entries:
            entry.queue_deadline = inf

    def expire(self, now: float) -> list[QueuedPiece]:
        """Remove and return expired pieces; delay pieces past their queue deadline if their level delays them."""
        expired: list[QueuedPiece] = []
        delayed: list[QueuedPiece] = []
        self.due = inf
        for entry in chain.from_iterable(level.by_age.values() for level in self._order):
            if entry.deadline > now and entry.queue_deadline > now:
                self.due = min(self.due, entry.deadline, entry.queue_deadline)
            elif entry.deadline > now and entry.priority in self._delaying:
                delayed.append(entry)
            else:
                expired.append(entry)
        for entry in expired:
            self._remove_piece(entry)
        for entry in delayed:
            self._remove_piece(entry)
            entry.queue_deadline = inf
            self._insert_piece(entry, entry.priority + DELAYED)
            self.due = min(self.due, entry.deadline)
        return expired

    def next_batch(self, now: float) -> Batch | None:
        """Return the batch to run now, or None if no piece waits, or if the batch should still wait for more pieces."""
        for level in self._order:
            if level.by_age:
                break
        else:
            return None
        batch = self._fill_batch(self._choose_anchor(level))
        if batch.closed is CloseReason.EMPTY and self._max_delay_s > 0:
            if now < self.wake_at():
                return None
            batch.closed = CloseReason.DELAY
        for entry in batch.entries:
            self._remove_piece(entry)
        if not level.by_age:
            self._anchor_owner = None
        return batch

    def _choose_anchor(self, level: _Level) -> QueuedPiece:
        """Return the piece around which the next batch is formed: usually the level's oldest piece.

        After MAX_ANCHORED_IN_A_ROW batches for one request, every other anchor is the oldest piece of another request.
        """
        oldest = next(iter(level.by_age.values()))
        if oldest.owner is not self._anchor_owner:
            self._anchor_owner, self._anchored_batches = oldest.owner, 0
        self._anchored_batches += 1
        if self._anchored_batches > MAX_ANCHORED_IN_A_ROW and self._anchored_batches % 2:
            return next((entry for entry in level.by_age.values() if entry.owner is not oldest.owner), oldest)
        return oldest

    def wake_at(self) -> float:
        """Return the time at which to call `next_batch` again even if no pieces arrive, or infinity."""
        if self._max_delay_s <= 0:
            return inf
        arrivals = (next(iter(level.by_age.values())).arrived for level in self._order if level.by_age)
        return min(arrivals, default=inf) + self._max_delay_s

    def _insert_piece(self, entry: QueuedPiece, rank: int) -> None:
        level = self._levels.get(rank)
        if level is None:
            level = self._levels[rank] = _Level()
            self._order = [self._levels[known] for known in sorted(self._levels)]
        self._sequence += 1
        entry.sequence, entry.level = self._sequence, level
        level.by_age[entry.sequence] = entry
        self.tokens += entry.rows * entry.length
        alike = level.by_key.get(entry.key)
        if alike is None:
            level.by_key[entry.key] = [entry]
        elif alike[-1].length <= entry.length:
            alike.append(entry)
        else:
            insort(alike, entry, key=_position)

    def _remove_piece(self, entry: QueuedPiece) -> None:
        level: _Level = entry.level
        entry.level = None
        del level.by_age[entry.sequence]
        self.tokens -= entry.rows * entry.length
        alike = level.by_key[entry.key]
        if len(alike) == 1:
            del level.by_key[entry.key]
        elif alike[0] is entry:
            del alike[0]
        else:
            del alike[bisect_left(alike, _position(entry), key=_position)]

    def _fill_batch(self, anchor: QueuedPiece) -> Batch:
        budget = self._budget
        tokens = anchor.rows * anchor.length
        batch = Batch([anchor], CloseReason.EMPTY, anchor.rows, anchor.length, tokens)
        if tokens and tokens == self.tokens:  # nothing else waits
            if batch.rows >= budget.max_rows:
                batch.closed = CloseReason.ROWS
            return batch
        max_tokens = self._token_budget()
        reach = budget.searched_tokens
        if reach is not None and reach >= self.tokens:
            reach = None
        for level in self._order:
            if batch.rows >= budget.max_rows or (reach is not None and reach <= 0):
                break
            if level.by_age:
                line = (
                    _iterate_by_length(level, anchor, reach)
                    if budget.order == "length"
                    else _iterate_by_arrival(level, anchor)
                )
                self._add_fitting(batch, line, max_tokens)
                if reach is not None and level is not self._order[-1]:
                    reach -= sum(entry.rows * entry.length for entry in level.by_age.values())
        if batch.rows >= budget.max_rows:
            batch.closed = CloseReason.ROWS
        return batch

    def _token_budget(self) -> int | None:
        """Return the next batch's token budget, lowered while few tokens wait, so that other instances get work."""
        most = self._budget.max_tokens
        return None if most is None else min(most, max(most // LEAST_PART, int(self.tokens * self._share)))

    def _add_fitting(self, batch: Batch, candidates: Candidates, max_tokens: int | None) -> None:
        """Add the candidates to the batch that fit into its budget."""
        rows, length, tokens = batch.rows, batch.length, batch.tokens
        entry = next(candidates, None)
        while entry is not None:
            with_rows = rows + entry.rows
            with_length = max(length, entry.length)
            with_tokens = tokens + entry.rows * entry.length
            refusal = self._closing_reason(with_rows, with_length, with_tokens, max_tokens)
            if refusal is None:
                batch.entries.append(entry)
                rows, length, tokens = with_rows, with_length, with_tokens
            else:
                batch.closed = refusal
            try:
                entry = candidates.send(refusal is None)
            except StopIteration:
                break
        batch.rows, batch.length, batch.tokens = rows, length, tokens

    def _closing_reason(self, rows: int, length: int, tokens: int, max_tokens: int | None) -> CloseReason | None:
        budget = self._budget
        if rows > budget.max_rows:
            return CloseReason.ROWS
        if max_tokens is not None and rows * length > max_tokens:
            return CloseReason.TOKENS
        if budget.order == "length":
            padding = rows * length - tokens
            if padding > budget.free_padding and padding > tokens * budget.max_padding:
                return CloseReason.PADDING
        return None


def _iterate_by_arrival(level: _Level, anchor: QueuedPiece) -> Candidates:
    """Yield the pieces with the anchor's key, except the anchor, in order of arrival, until one does not fit."""
    for entry in level.by_age.values():
        if entry.key == anchor.key and entry is not anchor and not (yield entry):
            return


def _iterate_by_length(level: _Level, anchor: QueuedPiece, reach: int | None) -> Candidates:
    """Yield the pieces with the anchor's key, except the anchor, nearest in length first.

    If a longer piece does not fit, no more longer ones are yielded; the same holds for shorter pieces.
    """
    entries = level.by_key.get(anchor.key)
    if entries is None:
        return
    last = _last_in_reach(level, reach)
    above = bisect_left(entries, (anchor.length, 0), key=_position)  # pieces of equal length: the oldest first
    below, end = above - 1, len(entries)
    while below >= 0 or above < end:
        go_down = above >= end or (
            below >= 0 and anchor.length - entries[below].length < entries[above].length - anchor.length
        )
        entry = entries[below if go_down else above]
        is_taken = entry is anchor or entry.sequence > last or (yield entry)
        if go_down:
            below = below - 1 if is_taken else -1
        else:
            above = above + 1 if is_taken else end


def _last_in_reach(level: _Level, reach: int | None) -> float:
    """Return the sequence number of the last piece within the first `reach` tokens of the level."""
    if reach is None:
        return inf
    for entry in level.by_age.values():
        reach -= entry.rows * entry.length
        if reach <= 0:
            return entry.sequence
    return inf
