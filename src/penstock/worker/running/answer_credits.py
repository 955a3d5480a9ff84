"""How many answers of a decoupled job may be sent: its gateway allows them, the model's thread uses them up."""

import asyncio
import threading


class AnswerCredits:
    """While none is allowed the model's thread waits, and the model with it. All but `take` is for the event loop."""

    def __init__(self, allowed: int, expiry: asyncio.TimerHandle) -> None:
        self._allowed = threading.Semaphore(allowed)
        self._expiry = expiry  # of the job
        self._is_closed = False

    def allow(self, count: int) -> None:
        self._allowed.release(count)

    def close(self) -> None:
        """No more answers are wanted: who waits in `take` is told so."""
        self._expiry.cancel()
        self._is_closed = True
        self._allowed.release()

    def take(self) -> bool:
        """Waits until one more answer may be sent. False: none is wanted any more."""
        if not self._is_closed:
            self._allowed.acquire()
        return not self._is_closed
