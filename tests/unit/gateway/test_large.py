"""Large messages off the event loop: a bound on what waits, and release when it is done."""

import gc
import threading
import weakref
from contextlib import suppress

import pytest

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, Overloaded
from penstock.gateway.large import HUGE_BYTES, LargeMessages


async def test_work_runs_in_another_thread_and_raises_here() -> None:
    large = LargeMessages(Limits())
    assert await large.decode(1, threading.get_ident) != threading.get_ident()
    assert await large.encode(1, threading.get_ident) != threading.get_ident()

    def fail() -> None:
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        await large.decode(1, fail)
    large.close()


async def test_what_waits_is_bounded_and_one_alone_is_always_taken() -> None:
    large = LargeMessages(Limits(max_decoding_bytes=1024))
    release = threading.Event()
    first = large.decode(HUGE_BYTES + 1, release.wait)
    first.send(None)  # it waits for its thread
    with pytest.raises(Overloaded, match="max_decoding_bytes"):
        await large.decode(1, release.wait)
    assert await large.encode(1, lambda: "answers are not refused") == "answers are not refused"
    release.set()
    while large._held_bytes:
        await large.encode(HUGE_BYTES + 1, lambda: None)
    first.close()
    assert await large.decode(1, lambda: "again") == "again"
    large.close()


async def test_an_error_does_not_hold_what_it_came_of() -> None:
    """Its traceback has frames in it: one that had the future too would keep the message until the next collection."""

    class Body:
        pass

    def fail(body: Body) -> None:
        raise InvalidRequest("no")

    large = LargeMessages(Limits())
    body = Body()
    left = weakref.ref(body)
    gc.disable()
    try:
        with suppress(InvalidRequest):
            await large.decode(1, fail, body)
        del body
        await large.encode(1, lambda: None)  # the thread has let go of it when it takes the next
        assert left() is None
    finally:
        gc.enable()
        large.close()
