"""What is counted of the blocks that routes name, for who compares them: answers, errors, latencies, what waits."""

import time
from collections.abc import Iterable
from math import inf

from penstock.core.cluster.answer_counts import AnswerCounts, bucket_of
from penstock.core.errors import Cancelled, PenstockError, RateLimited
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.routes import NameRoute

now = time.monotonic
CONTROL_S = 0.2  # after a request for the other block


class BlockWatch:
    """One block's.

    Where it is compared with another, the requests that come right after one for that are also counted alone: those of
    both meet the same moments of the machine, however unevenly they come.
    """

    def __init__(self, block_id: str) -> None:
        self._block_id = block_id
        self.other: BlockWatch | None = None  # with which it is compared
        self.last_began = -inf
        self._counts = AnswerCounts(block_id)
        self._controls = AnswerCounts(block_id, is_control=True)
        self._inside: dict[
            int, tuple[float, bool]
        ] = {}  # requests that it has: when they came, whether they are controls

    def began(self, request: InferRequest) -> None:
        at = self.last_began = now()
        is_control = self.other is not None and at - self.other.last_began < CONTROL_S
        self._inside[id(request)] = at, is_control

    def left(self, request: InferRequest) -> bool:
        """Returns whether it was a control. Another block has it now, or it is over."""
        return self._inside.pop(id(request), (0.0, False))[1]

    def answered(self, request: InferRequest, response: InferResponse, seconds: float) -> None:
        timing = response.timing
        has_run = bool(timing.compute_ns or timing.finish_ns)  # else it was kept, and says nothing of the model's speed
        for counts in self._of(request):
            counts.answers += 1
            if has_run:
                bucket = bucket_of(seconds)
                counts.latencies[bucket] = counts.latencies.get(bucket, 0) + 1

    def failed(self, request: InferRequest, error: PenstockError) -> None:
        for counts in self._of(request):
            if not isinstance(error, Cancelled | RateLimited):  # which say nothing of the block
                counts.errors[error.code] = counts.errors.get(error.code, 0) + 1

    def take(self, at: float) -> list[AnswerCounts]:
        """What was counted since it was last asked."""
        taken = [self._counts] if self.other is None else [self._counts, self._controls]
        self._counts, self._controls = AnswerCounts(self._block_id), AnswerCounts(self._block_id, is_control=True)
        for began, is_control in self._inside.values():
            bucket = bucket_of(at - began)
            for counts in taken[: 1 + is_control]:
                counts.waiting[bucket] = counts.waiting.get(bucket, 0) + 1
        return taken

    def _of(self, request: InferRequest) -> tuple[AnswerCounts, ...]:
        return (self._counts, self._controls) if self.left(request) else (self._counts,)


class Watches:
    """Those of a gateway."""

    def __init__(self) -> None:
        self._watches: dict[str, BlockWatch] = {}

    def watch(self, routes: Iterable[NameRoute]) -> bool:
        """From now on their blocks and no others; returns whether that is a change."""
        routes = list(routes)
        wanted = {block_id for route in routes for block_id in route.block_ids()}
        is_change = wanted != self._watches.keys()
        if is_change:
            self._watches = {block_id: self._watches.get(block_id) or BlockWatch(block_id) for block_id in wanted}
        others: dict[str, str] = {}
        for route in routes:
            if route.judged:
                others |= {route.shares[0].block_id: route.judged, route.judged: route.shares[0].block_id}
        for block_id, watch in self._watches.items():
            watch.other = self._watches.get(others.get(block_id, ""))
        return is_change

    def of(self, block_id: str) -> BlockWatch | None:
        return self._watches.get(block_id)

    def take(self) -> list[AnswerCounts]:
        """What was counted since it was last asked, and what waits now."""
        at = now()
        return [counts for watch in self._watches.values() for counts in watch.take(at)]
