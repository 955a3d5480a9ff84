"""The actions that the job table returns; the dispatcher performs them in order."""

from dataclasses import dataclass

from penstock.core.errors import PenstockError
from penstock.router.slots import Job

# Not frozen: a frozen dataclass takes three times as long to create, and each request creates at least one.


@dataclass(slots=True)
class SendJob:
    worker: bytes
    job: Job


@dataclass(slots=True)
class FailJob:
    job: Job
    error: PenstockError


@dataclass(slots=True)
class CancelJob:
    worker: bytes
    job_id: int


@dataclass(slots=True)
class RecallJob:
    """Ask the worker to return the job, unless the worker has started the job."""

    worker: bytes
    job_id: int


@dataclass(slots=True)
class CountRetry:
    """Count in the metrics that the job returned to its queue to run again."""

    job: Job
    reason: str


@dataclass(slots=True)
class SendProbe:
    """Ask the worker whether the block still works; pass the answer to `JobTable.receive_probe_result`."""

    worker: bytes
    block_id: str


@dataclass(slots=True)
class ReportEjection:
    """Log and count that the worker gets no new jobs of the block because too many jobs failed."""

    worker: bytes
    block_id: str
    reason: str


@dataclass(slots=True)
class ReportRestoration:
    """Log and count that the worker gets jobs of the block again."""

    worker: bytes
    block_id: str


Action = SendJob | FailJob | CancelJob | RecallJob | CountRetry | SendProbe | ReportEjection | ReportRestoration
