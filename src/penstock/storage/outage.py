"""Tracks an outage of a store. During an outage, one caller per period tries the store, and other callers skip it."""

RETRY_S = 0.5


class Outage:
    def __init__(self) -> None:
        self.is_on = False
        self._retry_at = 0.0

    def may_try(self, now: float) -> bool:
        """Return whether the caller should try the store; during an outage this is True once per RETRY_S."""
        if not self.is_on:
            return True
        if now < self._retry_at:
            return False
        self._retry_at = now + RETRY_S
        return True

    def record_failure(self, now: float) -> bool:
        """Record a failed call; return whether the outage starts with this call."""
        began = not self.is_on
        self.is_on = True
        self._retry_at = now + RETRY_S
        return began

    def record_success(self) -> bool:
        """Record a successful call; return whether the call ends an outage."""
        ended, self.is_on = self.is_on, False
        return ended
