"""When jobs are due, the earliest first."""

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush

from penstock.router.slots import Job


class JobDeadlines:
    """What no longer matters is dropped when its time comes, or when there is too much of it."""

    def __init__(self, jobs: Mapping[int, Job], is_alive: Callable[[Job, float], bool]) -> None:
        """`jobs` are all there are; `is_alive` says whether that time still matters to that job."""
        self._jobs = jobs
        self._is_alive = is_alive
        self._heap: list[tuple[float, int]] = []

    def watch(self, when: float, job_id: int) -> None:
        heappush(self._heap, (when, job_id))
        if len(self._heap) > 4 * len(self._jobs) + 1000:
            self._heap = [(when, job_id) for when, job_id in self._heap if self._find(when, job_id) is not None]
            heapify(self._heap)

    def pop(self, now: float) -> Job | None:
        """The next job that is due."""
        while self._heap and self._heap[0][0] <= now:
            when, job_id = heappop(self._heap)
            if (job := self._find(when, job_id)) is not None:
                return job
        return None

    def _find(self, when: float, job_id: int) -> Job | None:
        job = self._jobs.get(job_id)
        return job if job is not None and self._is_alive(job, when) else None
