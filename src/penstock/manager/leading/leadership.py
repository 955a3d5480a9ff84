"""Who leads: one manager at a time, by a lease in the metadata store. Decides; never acts.

Every manager holds a lease, and writes its name under it; who writes `leader` under its own leads, with the revision of
that record as its epoch. The lease is counted from when the call that prolonged it was sent, and a reign ends a margin
before that time is over: whatever pauses, answers late or is lost, it has ended here before the store can give the
record to another. A reign that has ended never goes on: where the lease turns out to be alive, the record is written
again, and that is another epoch.
"""

from dataclasses import dataclass

RETRY_S = 0.2  # after a call that failed
MARGIN = 0.1  # of the lease's time: clocks that do not run alike, and what is on its way
BEATS = 4  # how often a lease is prolonged in its time


# --- what happens


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
    """The store does not know it any more."""

    lease: int


@dataclass(frozen=True, slots=True)
class LeaseCallFailed:
    """Nobody knows whether it was heard."""

    lease: int  # 0: of a grant


@dataclass(frozen=True, slots=True)
class Registered:
    lease: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class CampaignEnded:
    """If it was won, or nobody knows, the record will be seen."""

    lease: int


@dataclass(frozen=True, slots=True)
class LeaderSeen:
    """The record `leader` is so, at that revision of the store."""

    revision: int
    lease: int  # that it was written under
    is_there: bool


@dataclass(frozen=True, slots=True)
class StoreSetBack:
    """Its revisions are lower than those that were seen: it was wiped, or is an older copy."""


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


# --- what is to be done


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
    """Write `leader`, if it has this revision; 0: if it is absent."""

    lease: int
    expected: int


@dataclass(frozen=True, slots=True)
class BeginReign:
    epoch: int


@dataclass(frozen=True, slots=True)
class EndReign:
    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class RevokeLease:
    lease: int


LeadershipAction = GrantLease | KeepLease | Register | Campaign | BeginReign | EndReign | RevokeLease


class Leadership:
    def __init__(self, ttl_s: float) -> None:
        self._beat_s = ttl_s / BEATS
        self._lease = 0
        self._until = 0.0  # the lease is certainly held before
        self._record = 0  # the revision of `leader` where that is this manager's
        self._epoch = 0  # the same, until its time is over
        self._reign = 0  # the epoch that was begun and not ended
        self._seen = 0  # the newest revision that is known of `leader`
        self._is_vacant = False
        self._is_registered = False
        self._is_calling = self._is_registering = self._is_campaigning = False
        self._call_at = self._register_at = self._campaign_at = 0.0
        self._is_resigned = False

    def epoch(self, now: float) -> int:
        """0: it does not lead. Asked at every act: nobody knows for how long a process was stopped just now."""
        return self._epoch if now < self._until and not self._is_resigned else 0

    @property
    def wake_at(self) -> float:
        """When time alone changes something."""
        if self._is_resigned:
            return float("inf")
        times = [self._until] if self._reign else []
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
        ended = self._reigns(now)
        match event:
            case LeaseGranted(lease, ttl_s, sent_at):
                self._is_calling = False
                self._lease, self._until = lease, _until(sent_at, ttl_s)
                self._call_at = sent_at + self._beat_s
            case LeaseKept(lease, left_s, sent_at) if lease == self._lease:
                self._is_calling = False
                self._until = max(self._until, _until(sent_at, left_s))
                self._call_at = sent_at + self._beat_s
            case LeaseEnded(lease) if lease == self._lease:
                self._forget_lease(now)
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
            case LeaderSeen(revision, lease, is_there) if revision > self._seen:
                self._seen, self._is_vacant = revision, not is_there
                self._record = self._epoch = revision if is_there and lease and lease == self._lease else 0
                self._campaign_at = now
            case StoreSetBack():
                self._seen, self._record, self._epoch = 0, 0, 0
            case Resigning():
                return self._resign(now)
        return [*ended, *self._reigns(now), *self._calls(now)]

    def _reigns(self, now: float) -> list[LeadershipAction]:
        epoch = self.epoch(now)
        if epoch == self._reign:
            return []
        found: list[LeadershipAction] = []
        if self._reign:
            why = "the store has not answered in time" if self._record == self._reign else "the record is another's"
            found.append(EndReign(self._reign, why))
        if epoch:
            found.append(BeginReign(epoch))
        self._reign = epoch
        return found

    def _calls(self, now: float) -> list[LeadershipAction]:
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

    def _forget_lease(self, now: float) -> None:
        """What was written under it is gone, or goes now."""
        self._lease, self._until, self._record, self._epoch = 0, 0.0, 0, 0
        self._is_registered = False
        self._is_calling = self._is_registering = self._is_campaigning = False
        self._call_at = now

    def _resign(self, now: float) -> list[LeadershipAction]:
        found: list[LeadershipAction] = [EndReign(self._reign, "it resigns")] if self._reign else []
        self._is_resigned, self._reign = True, 0
        return [*found, RevokeLease(self._lease)] if self._lease else found


def _until(sent_at: float, ttl_s: float) -> float:
    return sent_at + ttl_s * (1 - MARGIN)
