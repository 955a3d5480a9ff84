"""What the job table decides: the shell performs these in their order."""

from dataclasses import dataclass

from penstock.core.errors import PenstockError
from penstock.router.slots import Job

# Not frozen: a frozen one takes three times as long to make, and a request makes one at least.


@dataclass(slots=True)
class Send:
    worker: bytes
    job: Job


@dataclass(slots=True)
class FailJob:
    job: Job
    error: PenstockError


@dataclass(slots=True)
class CancelOn:
    worker: bytes
    job_id: int


@dataclass(slots=True)
class RecallFrom:
    """The worker is to hand the job back, where it has not started it."""

    worker: bytes
    job_id: int


@dataclass(slots=True)
class Retry:
    """For the counters: the job went back to its queue."""

    job: Job
    reason: str


@dataclass(slots=True)
class Probe:
    """Ask the worker whether the block still works; JobTable.probed takes the answer."""

    worker: bytes
    block_id: str


@dataclass(slots=True)
class Ejected:
    """For the log and the counters: it takes no new jobs of the block."""

    worker: bytes
    block_id: str
    reason: str


@dataclass(slots=True)
class Restored:
    """For the log and the counters: it takes jobs of the block again."""

    worker: bytes
    block_id: str


Action = Send | FailJob | CancelOn | RecallFrom | Retry | Probe | Ejected | Restored
