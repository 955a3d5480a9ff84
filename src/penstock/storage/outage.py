"""Whether a store is away: it is tried now and then, and nobody waits for it meanwhile. Decides; never acts."""

RETRY_S = 0.5


class Outage:
    def __init__(self) -> None:
        self.is_on = False
        self._retry_at = 0.0

    def may_try(self, now: float) -> bool:
        """While it is away, one caller in RETRY_S is told to try; the others go on without."""
        if not self.is_on:
            return True
        if now < self._retry_at:
            return False
        self._retry_at = now + RETRY_S
        return True

    def failed(self, now: float) -> bool:
        """True where this began it."""
        began = not self.is_on
        self.is_on = True
        self._retry_at = now + RETRY_S
        return began

    def worked(self) -> bool:
        """True where this ended it."""
        ended, self.is_on = self.is_on, False
        return ended
