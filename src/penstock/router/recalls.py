"""Which of the jobs that workers have are taken back for one of a higher level that waits. Decides; never acts.

Each job that has to wait takes back one at most: the one of the lowest level that was sent last, which its worker is
the least likely to have started. A worker that has started it says nothing, and it stays there. A job is taken back a
few times at most, and those of sessions never are: they go on where they are.
"""

from collections import defaultdict

from penstock.router.actions import RecallFrom
from penstock.router.slots import Job, Slot

MAX_RECALLS = 3  # of one job


class Recalls:
    def __init__(self) -> None:
        self._sent: defaultdict[int, dict[int, Job]] = defaultdict(dict)  # by level, in the order of their sending
        self._asked: set[int] = set()  # jobs that were asked for and are still there

    def sent(self, job: Job) -> None:
        if not job.session and job.recalls < MAX_RECALLS:
            self._sent[job.priority][job.job_id] = job

    def gone(self, job: Job) -> bool:
        """It has left its worker. Returns whether it was asked for."""
        self._sent[job.priority].pop(job.job_id, None)
        was_asked = job.job_id in self._asked
        self._asked.discard(job.job_id)
        return was_asked

    def choose(self, waiting: Job) -> RecallFrom | None:
        """What is taken back for this one."""
        if waiting.line is None or waiting.is_delayed:
            return None
        found = self._last_below(waiting.priority, waiting.line.slot)
        if found is None or found.slot is None:
            return None
        del self._sent[found.priority][found.job_id]
        self._asked.add(found.job_id)
        found.recalls += 1
        return RecallFrom(found.slot.worker, found.job_id)

    def _last_below(self, level: int, only: Slot | None) -> Job | None:
        """`only`: the slot that the waiting one has to go to."""
        for lower in sorted(self._sent, reverse=True):
            if lower <= level:
                return None
            for job in reversed(self._sent[lower].values()):
                if job.slot is only if only is not None else job.slot is not None and job.slot.may_take:
                    return job
        return None
