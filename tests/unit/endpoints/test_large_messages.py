"""Large messages are handled in threads, with a limit on the bytes that wait."""

import gc
import threading
import weakref
from contextlib import suppress
from typing import ClassVar

import pytest

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, Overloaded
from penstock.endpoints.large_messages import HUGE_BYTES, LargeMessagePool


class LittleRoom(Limits):
    max_decoding_bytes: ClassVar[int] = 1024


async def test_work_runs_in_another_thread_and_raises_here() -> None:
    large = LargeMessagePool(Limits())
    assert await large.decode(1, threading.get_ident) != threading.get_ident()
    assert await large.encode(1, threading.get_ident) != threading.get_ident()

    def fail() -> None:
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        await large.decode(1, fail)
    large.close()


async def test_waiting_bytes_are_limited_but_one_message_is_always_accepted() -> None:
    large = LargeMessagePool(LittleRoom())
    release = threading.Event()
    first = large.decode(HUGE_BYTES + 1, release.wait)
    first.send(None)  # it waits for its thread
    with pytest.raises(Overloaded, match="is 1024"):
        await large.decode(1, release.wait)
    assert await large.encode(1, lambda: "answers are not refused") == "answers are not refused"
    release.set()
    while large._held_bytes:
        await large.encode(HUGE_BYTES + 1, lambda: None)
    first.close()
    assert await large.decode(1, lambda: "again") == "again"
    large.close()


async def test_an_error_does_not_keep_its_message_in_memory() -> None:
    """If a frame of the traceback held the future, the message would stay until the next garbage collection."""

    class Body:
        pass

    def fail(body: Body) -> None:
        raise InvalidRequest("no")

    large = LargeMessagePool(Limits())
    body = Body()
    left = weakref.ref(body)
    gc.disable()
    try:
        with suppress(InvalidRequest):
            await large.decode(1, fail, body)
        del body
        await large.encode(1, lambda: None)  # the thread drops the message when it takes the next one
        assert left() is None
    finally:
        gc.enable()
        large.close()
