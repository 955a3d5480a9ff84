"""Records of asynchronous requests, from which every gateway derives the state of a request."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

LEASE_S = 10.0  # a running request counts as lost this long after its gateway's last renewal
PATH = "/v1/requests/{id}"


class AsyncState(StrEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # its gateway died; the request may have run


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A stored HTTP answer: status, media type and body."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class AsyncRecord:
    """An asynchronous request without its answer. Times are seconds since 1970."""

    request_id: str
    owner: str  # the id of the caller's key; empty: no key was required
    path: str
    state: AsyncState
    created_at: float
    expires_at: float
    alive_until: float  # end of a running request's lease
    finished_at: float = 0.0
    status: int = 0  # HTTP status of the answer
    is_cancel_asked: bool = False

    def seen_at(self, now: float) -> "AsyncRecord":
        """Return the record with its state at `now`. A running request is lost once its lease has ended."""
        if self.state is AsyncState.RUNNING and self.alive_until < now:
            return replace(self, state=AsyncState.LOST)
        return self

    def document(self) -> Mapping[str, object]:
        """Return the record as clients see it."""
        place = PATH.format(id=self.request_id)
        has_result = self.state not in (AsyncState.RUNNING, AsyncState.LOST)
        return {
            "id": self.request_id,
            "state": str(self.state),
            "path": self.path,
            "created_at": self.created_at,
            "finished_at": self.finished_at or None,
            "expires_at": self.expires_at,
            "status": self.status or None,
            "location": place,
            "result": f"{place}/result" if has_result else None,
        }


def make_finished_record(
    record: AsyncRecord, state: AsyncState, answer: StoredAnswer, now: float, ttl_s: float
) -> AsyncRecord:
    return replace(record, state=state, status=answer.status, finished_at=now, expires_at=now + ttl_s)
