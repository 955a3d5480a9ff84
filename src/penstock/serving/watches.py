"""What is counted of the blocks that routes name, for who compares them: answers, errors, latencies, what waits."""

import time
from collections.abc import Iterable

from penstock.core.answer_counts import AnswerCounts, bucket_of
from penstock.core.errors import Cancelled, PenstockError
from penstock.core.requests import InferRequest, InferResponse

now = time.monotonic


class BlockWatch:
    """One block's."""

    def __init__(self, block_id: str) -> None:
        self._block_id = block_id
        self._counts = AnswerCounts(block_id)
        self._inside: dict[int, float] = {}  # requests that the block has, with when they came

    def began(self, request: InferRequest) -> None:
        self._inside[id(request)] = now()

    def left(self, request: InferRequest) -> None:
        """Another block has it now."""
        self._inside.pop(id(request), None)

    def answered(self, request: InferRequest, response: InferResponse, seconds: float) -> None:
        self.left(request)
        self._counts.answers += 1
        timing = response.timing
        if timing.compute_ns or timing.finish_ns:  # else it was kept, and says nothing of the model's speed
            self._add_latency(seconds)

    def failed(self, request: InferRequest, error: PenstockError) -> None:
        self.left(request)
        if not isinstance(error, Cancelled):
            errors = self._counts.errors
            errors[error.code] = errors.get(error.code, 0) + 1

    def take(self, at: float) -> AnswerCounts:
        """What was counted since it was last asked."""
        counts, self._counts = self._counts, AnswerCounts(self._block_id)
        for began in self._inside.values():
            bucket = bucket_of(at - began)
            counts.waiting[bucket] = counts.waiting.get(bucket, 0) + 1
        return counts

    def _add_latency(self, seconds: float) -> None:
        latencies, bucket = self._counts.latencies, bucket_of(seconds)
        latencies[bucket] = latencies.get(bucket, 0) + 1


class Watches:
    """Those of a gateway."""

    def __init__(self) -> None:
        self._watches: dict[str, BlockWatch] = {}

    def watch(self, block_ids: Iterable[str]) -> bool:
        """From now on these and no others; returns whether that is a change."""
        wanted = set(block_ids)
        if wanted == self._watches.keys():
            return False
        self._watches = {block_id: self._watches.get(block_id) or BlockWatch(block_id) for block_id in wanted}
        return True

    def of(self, block_id: str) -> BlockWatch | None:
        return self._watches.get(block_id)

    def take(self) -> list[AnswerCounts]:
        """What was counted since it was last asked, and what waits now."""
        at = now()
        return [watch.take(at) for watch in self._watches.values()]
