"""The health of slots (a block on a worker): when failures eject a slot, and when it is probed. Pure: no I/O.

Several failures or timeouts in a row eject a slot: the slot gets no new jobs until a probe succeeds. The time between
probes doubles while probes fail. At least one slot of a block is never ejected, because a failing slot is better than
no slot.
"""

from dataclasses import dataclass
from math import inf

from penstock.core.errors import DeadlineExceeded, DeviceOutOfMemory, EngineFailed, InternalError, WireError
from penstock.core.settings import Health

# Failures of the model or its worker. They include DeviceOutOfMemory, because another worker's GPU may have room.
FAULT_CODES = frozenset({EngineFailed.code, InternalError.code, WireError.code, DeviceOutOfMemory.code})
TIMEOUT_CODE = DeadlineExceeded.code
MAX_WAIT_FACTOR = 12  # longest time between probes, in multiples of eject_s: a minute by default
MAX_MESSAGE_CHARS = 300  # characters of an error message that are stored


@dataclass(slots=True)
class SlotFailures:
    """The recent failures of a slot; a healthy slot has no Condition."""

    failures: int = 0  # in a row
    timeouts: int = 0  # in a row
    reason: str = ""
    ejected_at: float = 0.0
    probe_wait_s: float = 0.0  # between two probes
    next_check_at: float = inf  # when to send the next probe, or to stop waiting for the answer to the last probe
    is_probing: bool = False

    def count_failure(self, rules: Health, message: str) -> bool:
        """Count a failure; return whether the slot has had too many failures in a row."""
        self.failures += 1
        self.reason = f"{self.failures} failures in a row; last: {message[:MAX_MESSAGE_CHARS]}"
        return 0 < rules.failures <= self.failures

    def count_timeout(self, rules: Health) -> bool:
        """Count a timeout; return whether the slot has had too many timeouts in a row."""
        self.timeouts += 1
        self.reason = f"{self.timeouts} deadlines in a row passed while it ran requests"
        return 0 < rules.timeouts <= self.timeouts

    def eject(self, rules: Health, now: float) -> None:
        self.ejected_at = now
        self.probe_wait_s = rules.eject_s
        self.next_check_at = now + self.probe_wait_s

    def start_probe(self, rules: Health, now: float) -> bool:
        """Return whether to send a probe now; if the last probe is unanswered, postpone the next and return False."""
        if self.is_probing:
            self.postpone_probe(rules, now)
            return False
        self.is_probing = True
        self.next_check_at = now + rules.eject_s
        return True

    def postpone_probe(self, rules: Health, now: float) -> None:
        self.is_probing = False
        self.probe_wait_s = min(2 * self.probe_wait_s, MAX_WAIT_FACTOR * rules.eject_s)
        self.next_check_at = now + self.probe_wait_s


def compute_ejection_limit(slots: int) -> int:
    """Return how many of a block's slots may be ejected at once: half, so that the other slots can run all jobs."""
    return slots // 2
