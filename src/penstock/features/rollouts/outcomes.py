"""Counts the outcomes of blocks in a gateway: answers, errors, latencies and waiting requests.

A rollout compares the counts of its two blocks.
"""

import time
from collections.abc import Iterable
from math import inf

from penstock.core.cluster.answer_counts import AnswerCounts, find_bucket
from penstock.core.cluster.routes import NameRoute
from penstock.core.errors import Cancelled, PenstockError, RateLimited
from penstock.core.requests import InferRequest, InferResponse

now = time.monotonic
CONTROL_S = 0.2  # a request is a control if it comes within this time after a request to the other block


class BlockWatch:
    """Counts the outcomes of one block.

    If the block is compared with another block, requests that come right after a request to the other block are also
    counted separately, as controls. So the controls of both blocks come from the same moments, even if the traffic of
    the blocks is uneven.
    """

    def __init__(self, block_id: str) -> None:
        self._block_id = block_id
        self.other: BlockWatch | None = None  # the block with which this block is compared
        self.last_began = -inf
        self._counts = AnswerCounts(block_id)
        self._controls = AnswerCounts(block_id, is_control=True)
        self._inside: dict[int, tuple[float, bool]] = {}  # by running request: its start, and whether it is a control

    def begin_request(self, request: InferRequest) -> None:
        at = self.last_began = now()
        is_control = self.other is not None and at - self.other.last_began < CONTROL_S
        self._inside[id(request)] = at, is_control

    def end_request(self, request: InferRequest) -> bool:
        """Stop counting a request that ended or went to another block; return whether the request was a control."""
        return self._inside.pop(id(request), (0.0, False))[1]

    def count_answer(self, request: InferRequest, response: InferResponse, seconds: float) -> None:
        timing = response.timing
        has_run = bool(timing.compute_ns or timing.finish_ns)  # otherwise the answer came from a cache
        for counts in self._counts_for(request):
            counts.answers += 1
            if has_run:
                bucket = find_bucket(seconds)
                counts.latencies[bucket] = counts.latencies.get(bucket, 0) + 1

    def count_error(self, request: InferRequest, error: PenstockError) -> None:
        for counts in self._counts_for(request):
            if not isinstance(error, Cancelled | RateLimited):  # the block did not cause these errors
                counts.errors[error.code] = counts.errors.get(error.code, 0) + 1

    def take_counts(self, at: float) -> list[AnswerCounts]:
        """Return the counts since the last call, and the ages of the running requests."""
        taken = [self._counts] if self.other is None else [self._counts, self._controls]
        self._counts, self._controls = AnswerCounts(self._block_id), AnswerCounts(self._block_id, is_control=True)
        for began, is_control in self._inside.values():
            bucket = find_bucket(at - began)
            for counts in taken[: 1 + is_control]:
                counts.waiting[bucket] = counts.waiting.get(bucket, 0) + 1
        return taken

    def _counts_for(self, request: InferRequest) -> tuple[AnswerCounts, ...]:
        return (self._counts, self._controls) if self.end_request(request) else (self._counts,)


class BlockWatches:
    """Counts the outcomes of the blocks of a gateway that take part in rollouts."""

    def __init__(self) -> None:
        self._watches: dict[str, BlockWatch] = {}

    def watch(self, routes: Iterable[NameRoute]) -> bool:
        """Watch exactly the blocks of these routes; return whether the blocks changed."""
        routes = list(routes)
        wanted = {block_id for route in routes for block_id in route.block_ids()}
        is_change = wanted != self._watches.keys()
        if is_change:
            self._watches = {block_id: self._watches.get(block_id) or BlockWatch(block_id) for block_id in wanted}
        others: dict[str, str] = {}
        for route in routes:
            if route.compared_block:
                others |= {
                    route.shares[0].block_id: route.compared_block,
                    route.compared_block: route.shares[0].block_id,
                }
        for block_id, watch in self._watches.items():
            watch.other = self._watches.get(others.get(block_id, ""))
        return is_change

    def get_watch(self, block_id: str) -> BlockWatch | None:
        return self._watches.get(block_id)

    def take_counts(self) -> list[AnswerCounts]:
        """Return the counts of all blocks since the last call."""
        at = now()
        return [counts for watch in self._watches.values() for counts in watch.take_counts(at)]
