"""Which slots are fit to take jobs. Decides; never acts.

Failures or timeouts in a row eject a slot; it takes no new jobs until a probe of it works. The time between probes
doubles while they fail. Some slots always stay, however bad they are: a job that may fail is better than none.
"""

from dataclasses import dataclass
from math import inf

from penstock.core.errors import DeadlineExceeded, DeviceOutOfMemory, EngineFailed, InternalError, WireError
from penstock.core.settings import Health

# Of the model or its worker. Where a GPU has no room for anything any more, another may have.
FAULTS = frozenset({EngineFailed.code, InternalError.code, WireError.code, DeviceOutOfMemory.code})
TIMEOUT = DeadlineExceeded.code
MAX_MESSAGE = 300  # characters of what failed that are kept


@dataclass(slots=True)
class Condition:
    """What speaks against a slot. One in good order has none."""

    failures: int = 0  # in a row, as the timeouts
    timeouts: int = 0
    reason: str = ""
    ejected_at: float = 0.0
    wait_s: float = 0.0  # from one probe to the next
    due: float = inf  # when the next probe is sent, or the one that was has failed
    is_probing: bool = False

    def failed(self, rules: Health, message: str) -> bool:
        """True: the slot is to be ejected, if others may stand in."""
        self.failures += 1
        self.reason = f"{self.failures} failures in a row; last: {message[:MAX_MESSAGE]}"
        return 0 < rules.failures <= self.failures

    def timed_out(self, rules: Health) -> bool:
        """True: the slot is to be ejected, if others may stand in."""
        self.timeouts += 1
        self.reason = f"{self.timeouts} deadlines in a row passed while it ran requests"
        return 0 < rules.timeouts <= self.timeouts

    def eject(self, rules: Health, now: float) -> None:
        self.ejected_at = now
        self.wait_s = min(rules.eject_s, rules.eject_max_s)
        self.due = now + self.wait_s

    def start_probe(self, rules: Health, now: float) -> bool:
        """When one is due. False: the last one went unanswered, and the next has to wait."""
        if self.is_probing:
            self.put_off(rules, now)
            return False
        self.is_probing = True
        self.due = now + rules.eject_s
        return True

    def put_off(self, rules: Health, now: float) -> None:
        self.is_probing = False
        self.wait_s = min(2 * self.wait_s, rules.eject_max_s)
        self.due = now + self.wait_s


def may_be_ejected(rules: Health, slots: int) -> int:
    """How many of a block's slots may be ejected at once; one always stays."""
    return max(0, min(int(rules.max_ejected * slots + 1e-9), slots - 1))
