"""The election of one leader at a time, by leases in the metadata store. Pure: no I/O.

Every manager holds a lease, and registers its name with it. The manager that writes the record `leader` with its lease
leads; the revision of that record is its epoch. The time of a lease counts from when the call that renewed it was sent,
and a term ends a margin before the lease can expire. So a paused or disconnected leader has ended its term before
another manager can write the record. A term that has ended never resumes: if the lease is still alive, the manager
writes the record again, which starts a new epoch.
"""

from dataclasses import dataclass

RETRY_S = 0.2  # after a call that failed
MARGIN = 0.1  # share of the lease's time, for clock drift and messages in flight
RENEWALS = 4  # renewals of a lease within its time


# --- events


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    lease: int
    ttl_s: float
    sent_at: float


@dataclass(frozen=True, slots=True)
class LeaseKept:
    lease: int
    left_s: float
    sent_at: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The lease has expired or was revoked in the store."""

    lease: int


@dataclass(frozen=True, slots=True)
class LeaseCallFailed:
    """A call to grant or renew a lease failed; the store may have executed the call."""

    lease: int  # 0: the call was a grant


@dataclass(frozen=True, slots=True)
class Registered:
    lease: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class CampaignEnded:
    """The attempt to write `leader` has ended; if it succeeded, `LeaderSeen` follows."""

    lease: int


@dataclass(frozen=True, slots=True)
class LeaderSeen:
    """The state of the record `leader` at a revision of the store."""

    revision: int
    lease: int  # the lease of the manager that wrote the record
    exists: bool


@dataclass(frozen=True, slots=True)
class StoreSetBack:
    """The store's revisions are lower than before: the store was wiped, or restored from an older copy."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


@dataclass(frozen=True, slots=True)
class Resigning:
    pass


LeadershipEvent = (
    LeaseGranted
    | LeaseKept
    | LeaseEnded
    | LeaseCallFailed
    | Registered
    | CampaignEnded
    | LeaderSeen
    | StoreSetBack
    | TimePassed
    | Resigning
)


# --- actions


@dataclass(frozen=True, slots=True)
class GrantLease:
    pass


@dataclass(frozen=True, slots=True)
class KeepLease:
    lease: int


@dataclass(frozen=True, slots=True)
class Register:
    lease: int


@dataclass(frozen=True, slots=True)
class Campaign:
    """Write the record `leader` if its revision is `expected`; 0 means that the record must not exist."""

    lease: int
    expected: int


@dataclass(frozen=True, slots=True)
class BeginTerm:
    epoch: int


@dataclass(frozen=True, slots=True)
class EndTerm:
    epoch: int
    reason: str
    is_resigning: bool = False


@dataclass(frozen=True, slots=True)
class RevokeLease:
    lease: int


LeadershipAction = GrantLease | KeepLease | Register | Campaign | BeginTerm | EndTerm | RevokeLease


class Leadership:
    def __init__(self, ttl_s: float) -> None:
        self._renew_s = ttl_s / RENEWALS
        self._lease = 0
        self._until = 0.0  # the lease is certainly held until this time
        self._record = 0  # the revision of `leader` if this manager wrote it, else 0
        self._epoch = 0  # like `_record`, but 0 once the lease may have expired
        self._term = 0  # the epoch of the term that was started and not ended
        self._seen = 0  # the newest known revision of `leader`
        self._is_vacant = False
        self._is_registered = False
        self._is_calling = self._is_registering = self._is_campaigning = False
        self._call_at = self._register_at = self._campaign_at = 0.0
        self._is_resigned = False

    def compute_epoch(self, now: float) -> int:
        """Return the epoch, or 0 if this manager does not lead.

        Call this before every write, because the process may have been paused since the last check.
        """
        return self._epoch if now < self._until and not self._is_resigned else 0

    @property
    def wake_at(self) -> float:
        """Return the time at which to send the next `TimePassed`; an earlier one would have no effect."""
        if self._is_resigned:
            return float("inf")
        times = [self._until] if self._term else []
        if not self._is_calling:
            times.append(self._call_at)
        if self._lease and not self._is_registered and not self._is_registering:
            times.append(self._register_at)
        if self._may_campaign(self._campaign_at):
            times.append(self._campaign_at)
        return min(times, default=float("inf"))

    def handle(self, event: LeadershipEvent, now: float) -> list[LeadershipAction]:
        if self._is_resigned:
            return []
        if now >= self._until:
            self._epoch = 0
        ended = self._update_term(now)
        match event:
            case LeaseGranted(lease, ttl_s, sent_at):
                self._is_calling = False
                self._lease, self._until = lease, _compute_lease_end(sent_at, ttl_s)
                self._call_at = sent_at + self._renew_s
            case LeaseKept(lease, left_s, sent_at) if lease == self._lease:
                self._is_calling = False
                self._until = max(self._until, _compute_lease_end(sent_at, left_s))
                self._call_at = sent_at + self._renew_s
            case LeaseEnded(lease) if lease == self._lease:
                self._drop_lease(now)
            case LeaseCallFailed(lease) if lease == self._lease:
                self._is_calling = False
                self._call_at = now + RETRY_S
            case Registered(lease, is_done) if lease == self._lease:
                self._is_registering = False
                self._is_registered = is_done
                self._register_at = now + RETRY_S
            case CampaignEnded(lease) if lease == self._lease:
                self._is_campaigning = False
                self._campaign_at = now + RETRY_S
            case LeaderSeen(revision, lease, exists) if revision > self._seen:
                self._seen, self._is_vacant = revision, not exists
                self._record = self._epoch = revision if exists and lease and lease == self._lease else 0
                self._campaign_at = now
            case StoreSetBack():
                self._seen, self._record, self._epoch = 0, 0, 0
            case Resigning():
                return self._resign()
        return [*ended, *self._update_term(now), *self._start_due_calls(now)]

    def _update_term(self, now: float) -> list[LeadershipAction]:
        epoch = self.compute_epoch(now)
        if epoch == self._term:
            return []
        found: list[LeadershipAction] = []
        if self._term:
            is_late = self._record == self._term
            reason = "the metadata store did not renew the lease in time" if is_late else "another manager leads"
            found.append(EndTerm(self._term, reason))
        if epoch:
            found.append(BeginTerm(epoch))
        self._term = epoch
        return found

    def _start_due_calls(self, now: float) -> list[LeadershipAction]:
        found: list[LeadershipAction] = []
        if not self._is_calling and now >= self._call_at:
            self._is_calling = True
            found.append(KeepLease(self._lease) if self._lease else GrantLease())
        if self._lease and not self._is_registered and not self._is_registering and now >= self._register_at:
            self._is_registering = True
            found.append(Register(self._lease))
        if self._may_campaign(now) and now >= self._campaign_at:
            self._is_campaigning = True
            found.append(Campaign(self._lease, self._record))
        return found

    def _may_campaign(self, now: float) -> bool:
        is_open = self._is_vacant or (self._record and not self._epoch)
        return bool(is_open and self._lease and now < self._until and not self._is_campaigning)

    def _drop_lease(self, now: float) -> None:
        """Forget the lease; the store removes the records that were written with it."""
        self._lease, self._until, self._record = 0, 0.0, 0
        self._is_registered = False
        self._is_calling = self._is_registering = self._is_campaigning = False
        self._call_at = now

    def _resign(self) -> list[LeadershipAction]:
        found: list[LeadershipAction] = []
        if self._term:
            found.append(EndTerm(self._term, "manager is shutting down", is_resigning=True))
        self._is_resigned = True
        return [*found, RevokeLease(self._lease)] if self._lease else found


def _compute_lease_end(sent_at: float, ttl_s: float) -> float:
    return sent_at + ttl_s * (1 - MARGIN)
